from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import stageline as sl
from stageline.zoo.amoebanet import (
    NORMAL,
    NORMAL_B,
    REDUCTION,
    REDUCTION_B,
    B,
    Cells,
    D,
    Genotype,
    Halve,
    Stem,
    amoebanet,
    amoebanet_d,
)


def on_meta(num_layers: int, num_filters: int) -> sl.LayerSequence:
    with torch.device("meta"):
        return amoebanet_d(num_layers=num_layers, num_filters=num_filters)


def tiny() -> sl.LayerSequence:
    torch.manual_seed(0)
    return amoebanet_d(num_classes=5, num_layers=3, num_filters=16)


def values(layers: sl.LayerSequence, images: Tensor) -> dict[str, Tensor]:
    """Return all values that layers write, by name."""
    found = {"x": images}
    for layer in layers:
        (name,) = layer.writes
        found[name] = layer.module(*(found[read] for read in layer.reads))
    return found


@pytest.mark.parametrize(
    ("num_layers", "num_filters", "ours", "paper", "digit"),
    [
        (18, 208, 81_139_629, 82e6, 1e6),
        (18, 416, 317_564_584, 318e6, 1e6),
        (18, 544, 540_240_600, 542e6, 1e6),
        (36, 544, 1_053_338_136, 1.05e9, 1e7),
        (72, 512, 1_842_648_616, 1.8e9, 1e8),
    ],
)
def test_parameters_are_those_of_gpipes_table_1(
    num_layers: int, num_filters: int, ours: int, paper: float, digit: float
) -> None:
    """Allow half a per cent, as for an auxiliary head in training, besides the last digit."""
    parameters = on_meta(num_layers, num_filters).modules.parameters()
    assert sum(parameter.numel() for parameter in parameters) == ours
    assert abs(ours - paper) < 0.005 * paper + digit / 2


def test_parameters_of_the_model_whose_speed_gpipe_and_torchgpipe_measure() -> None:
    parameters = on_meta(18, 256).modules.parameters()
    assert sum(parameter.numel() for parameter in parameters) == 121_916_424


def test_parameters_of_amoebanet_b_are_the_557_million_of_gpipes_imagenet_model() -> None:
    with torch.device("meta"):
        parameters = amoebanet(B, 1000, num_layers=18, num_filters=512).modules.parameters()
    assert sum(parameter.numel() for parameter in parameters) == 557_333_736


@pytest.mark.parametrize("cells", [B, D])
def test_the_stem_for_small_images_keeps_their_size(cells: Cells) -> None:
    layers = amoebanet(cells, 10, num_layers=3, num_filters=8, stem="small", image_channels=1)
    found = values(layers, torch.randn(2, 1, 14, 14))
    sides = {name: value.shape[-1] for name, value in found.items() if value.ndim == 4}
    assert sides == {
        "stem": 14,
        "normal.0": 14,
        "reduction.0": 7,
        "normal.1": 7,
        "reduction.1": 4,
        "normal.2": 4,
    }
    assert found["x"].shape == (2, 10)


@pytest.mark.parametrize("stem", ["imagenet", "small"])
def test_the_auxiliary_head_reads_the_last_cell_before_the_last_reduction(stem: Stem) -> None:
    """So it is in the middle, as in the reference code, and its logits are the second output."""
    layers = amoebanet(B, 5, num_layers=6, num_filters=16, stem=stem, has_auxiliary_head=True)
    reads = {layer.name: layer.reads for layer in layers}
    assert reads["auxiliary"] == ("normal.3",)
    assert reads["head"] == ("normal.5", "auxiliary")
    found = values(layers, torch.randn(2, 3, 32, 32))
    logits, auxiliary = found["x"]
    assert logits.shape == auxiliary.shape == (2, 5)
    assert auxiliary is found["auxiliary"]


def test_the_auxiliary_head_changes_no_other_parameter() -> None:
    plain, with_head = (
        {name: value.shape for name, value in layers.state_dict().items()}
        for layers in (
            amoebanet(D, 5, 3, 16),
            amoebanet(D, 5, 3, 16, has_auxiliary_head=True),
        )
    )
    others = {n: shape for n, shape in with_head.items() if not n.startswith("auxiliary.")}
    assert others == plain
    assert len(with_head) > len(plain)


def test_cells_halve_the_image_and_widen_it() -> None:
    found = values(on_meta(18, 256), torch.empty(2, 3, 224, 224, device="meta"))
    assert {name: tuple(found[name].shape) for name in found if "normal" not in name} == {
        "x": (2, 1000),
        "stem": (2, 64, 112, 112),
        "reduction.0": (2, 192, 56, 56),
        "reduction.1": (2, 384, 28, 28),
        "reduction.2": (2, 1536, 14, 14),
        "reduction.3": (2, 3072, 7, 7),
    }
    assert [found[f"normal.{number}"].shape[1] for number in (0, 5, 6, 11, 12, 17)] == [
        *(1024, 1024, 2048, 2048, 4096, 4096)
    ]


def test_all_operations_round_odd_sizes_up() -> None:
    found = values(tiny(), torch.randn(2, 3, 37, 51))
    assert found["normal.2"].shape == (2, 256, 2, 2)
    assert found["x"].shape == (2, 5)


def test_every_cell_reads_the_two_before_it() -> None:
    assert {layer.name: layer.reads for layer in tiny()} == {
        "stem": ("x",),
        "reduction.0": ("stem", "stem"),
        "reduction.1": ("stem", "reduction.0"),
        "normal.0": ("reduction.0", "reduction.1"),
        "reduction.2": ("reduction.1", "normal.0"),
        "normal.1": ("normal.0", "reduction.2"),
        "reduction.3": ("reduction.2", "normal.1"),
        "normal.2": ("normal.1", "reduction.3"),
        "head": ("normal.2",),
    }


@pytest.mark.parametrize("genotype", [NORMAL, REDUCTION, NORMAL_B, REDUCTION_B])
def test_every_state_is_used_and_computed_before_it_is_read(genotype: Genotype) -> None:
    read = [{use.state for use in pair} for pair in genotype.pairs]
    assert all(max(states) < number for number, states in enumerate(read, start=2))
    assert set().union(*read) | set(genotype.joined) == set(range(7))


def test_halving_sees_even_pixels_and_odd_pixels() -> None:
    halve = Halve(1, 2).eval()
    for conv in (halve.here, halve.next):
        torch.nn.init.ones_(conv.weight)
    here, following = halve(torch.arange(16.0).view(1, 1, 4, 4))[0].round()
    assert here.tolist() == [[0, 2], [8, 10]]
    assert following.tolist() == [[5, 7], [13, 15]]


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "schedule"), [(2, "gpipe"), (3, "1f1b")])
def test_a_step_is_bit_identical_to_a_plain_loop(num_ranks: int, schedule: str) -> None:
    pipe = sl.Pipeline(
        tiny(),
        cross_entropy,
        num_ranks=num_ranks,
        num_microbatches=2,
        schedule=schedule,
        backend="serial",
    )
    images, target = torch.randn(5, 3, 32, 32), torch.randint(5, (5,))
    pipe.verify(images, target)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    first = float(pipe.step(images, target).loss)
    assert all(parameter.grad is not None for parameter in pipe.parameters())
    optimizer.step()
    optimizer.zero_grad()
    assert float(pipe.step(images, target).loss) < first
    pipe.close()
