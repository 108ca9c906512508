from __future__ import annotations

import pytest
import torch
from torch import Tensor

import stageline as sl
from stageline.zoo.gpt import loss
from stageline.zoo.transformer import sinusoids, transformer


def tiny(num_layers: int = 4) -> sl.LayerSequence:
    torch.manual_seed(0)
    return transformer(num_layers, vocabulary=11, width=16, heads=2)


def logits(layers: sl.LayerSequence, tokens: Tensor) -> Tensor:
    x = tokens
    for layer in layers:
        x = layer.module(x)
    return x


@pytest.mark.parametrize(
    ("num_layers", "ours", "paper", "digit"),
    [
        (3, 282_182_912, 282.2e6, 1e5),
        (13, 785_765_632, 785.8e6, 1e5),
        (103, 5_318_010_112, 5.3e9, 1e8),
        (415, 21_029_790_976, 21e9, 1e9),
        pytest.param(1663, 83_876_914_432, 83.9e9, 1e8, marks=pytest.mark.slow),
    ],
)
def test_parameters_are_those_of_gpipes_table_1_to_its_last_digit(
    num_layers: int, ours: int, paper: float, digit: float
) -> None:
    with torch.device("meta"):
        layers = transformer(num_layers)
    assert len(layers) == num_layers + 2
    assert sum(parameter.numel() for parameter in layers.modules.parameters()) == ours
    assert abs(ours - paper) < digit / 2


def test_a_sequence_of_1024_gives_logits_for_each_position() -> None:
    with torch.device("meta"):
        tokens = torch.empty(2, 1024, dtype=torch.long)
        assert logits(transformer(3), tokens).shape == (2, 1024, 32_000)


def test_no_position_sees_those_after_it() -> None:
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 9, 0]])
    one, other = logits(tiny(), tokens)
    torch.testing.assert_close(one[:4], other[:4])
    assert not torch.allclose(one[4:], other[4:])


def test_positions_differ_and_are_sinusoids_of_periods_up_to_ten_thousand() -> None:
    found = sinusoids(1024, 8, torch.device("cpu"))
    assert found.shape == (1024, 8)
    assert len({tuple(row) for row in found.tolist()}) == 1024
    torch.testing.assert_close(found[:, 0], torch.arange(1024).float().sin())
    torch.testing.assert_close(found[:, 7], (torch.arange(1024) / 1e4).cos())


def test_initial_feed_forward_weights_are_divided_by_the_number_of_layers() -> None:
    first, tenth = (tiny(num_layers).layers[1].module for num_layers in (1, 10))
    for name, parameter in first.named_parameters():
        is_scaled = "feed_forward" in name and "norm" not in name
        expected = parameter / 10 if is_scaled else parameter
        assert torch.equal(tenth.get_parameter(name), expected), name


def test_weights_initialised_from_the_meta_device_are_scaled_too() -> None:
    with torch.device("meta"):
        layers = transformer(10, vocabulary=11, width=16, heads=2)
    sl.Pipeline(layers, loss, num_ranks=2, num_microbatches=2, backend="serial").close()
    weight = layers.layers[1].module.get_parameter("feed_forward.inward.weight")
    assert 0.02 < weight.abs().max() <= 16**-0.5 / 10  # nn.Linear draws up to 1 / √width


@pytest.mark.parametrize("num_ranks", [pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
def test_a_step_is_bit_identical_to_a_plain_loop(num_ranks: int, schedule: str) -> None:
    pipe = sl.Pipeline(
        tiny(),
        loss,
        num_ranks=num_ranks,
        num_microbatches=4,
        schedule=schedule,
        backend="serial",
    )
    tokens = torch.randint(11, (7, 8))
    pipe.verify(tokens, tokens.roll(1))
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    first = float(pipe.step(tokens, tokens.roll(1)).loss)
    optimizer.step()
    optimizer.zero_grad()
    assert float(pipe.step(tokens, tokens.roll(1)).loss) < first
    pipe.close()
