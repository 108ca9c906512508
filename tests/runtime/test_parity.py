"""The same bits as a plain loop: every schedule, backend and number of ranks.

The plain loop is written out here, so that a reader sees what the pipeline is held to.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from stageline.errors import ModelError
from stageline.model.layers import Layer, LayerSequence
from stageline.pipeline import Pipeline
from stageline.runtime.randomness import layer_seed
from stageline.schedules.build import schedule_names
from stageline.schedules.schedule import Schedule

NUM_STEPS = 3
SEED = 11


class Case(NamedTuple):
    """A model, how it is called in one piece, and a batch for it."""

    layers: LayerSequence
    inputs: Any
    target: Tensor

    def output(self, inputs: Any, step: int, microbatch: int) -> Any:
        """All layers one after another, each given the values that it names and its own seed."""
        values = dict(inputs) if isinstance(inputs, dict) else {"x": inputs}
        for layer in self.layers.layers:
            torch.manual_seed(layer_seed(SEED, step, microbatch, layer.name))
            result = layer.module(*(values[name] for name in layer.reads))
            results = result if len(layer.writes) > 1 else (result,)
            values |= dict(zip(layer.writes, results, strict=True))
        return values[self.layers.layers[-1].writes[0]]


def chain() -> Case:
    """Twelve layers in nested Sequentials, and a batch that does not divide."""
    blocks = [nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(5)]
    model = nn.Sequential(nn.Linear(8, 12), *blocks, nn.Linear(12, 3))
    return Case(LayerSequence.of(model), torch.randn(19, 8), torch.randn(19, 3))


class Join(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2 * width, width, 3, padding=1)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        joined: Tensor = self.conv(torch.cat([x, skip], dim=1))
        return joined


def unet() -> Case:
    """Skips across several stages, innermost last."""
    down = [
        Layer(f"down{i}", nn.Conv2d(3 if i == 0 else 4, 4, 3, padding=1), ("x",), ("x", f"skip{i}"))
        for i in range(3)
    ]
    down = [Layer(d.name, Both(d.module), d.reads, d.writes) for d in down]
    bottom = [Layer("bottom", nn.Conv2d(4, 4, 3, padding=1))]
    up = [Layer(f"up{i}", Join(4), ("x", f"skip{i}")) for i in (2, 1, 0)]
    layers = LayerSequence((*down, *bottom, *up, Layer("head", nn.Conv2d(4, 2, 1))))
    return Case(layers, torch.randn(6, 3, 8, 8), torch.randn(6, 2, 8, 8))


class Both(nn.Module):
    """A value that goes on, and a copy of it for later."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.relu(self.module(x))
        return y, y


class Attend(nn.Module):
    """Reads a value that others read as well, a mask that may be None, and a number."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Linear(width, width)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        mixed: Tensor = self.mix(x) + scale * memory
        return mixed if mask is None else mixed * mask


def readers() -> Case:
    """Inputs by name, one of them None, and a value that three later layers read."""
    reads = ("x", "memory", "mask", "scale")
    layers = LayerSequence(
        (
            Layer("encode", nn.Linear(8, 8), ("source",), ("memory",)),
            Layer("embed", nn.Linear(4, 8), ("query",)),
            *(Layer(f"attend{i}", Attend(8), reads) for i in range(3)),
            Layer("head", nn.Linear(8, 2)),
        )
    )
    inputs = {"source": torch.randn(10, 8), "query": torch.randn(10, 4), "mask": None, "scale": 0.5}
    return Case(layers, inputs, torch.randn(10, 2))


class Block(nn.Module):
    """Attention and feed-forward with dropout, and some noise that no module of torch's makes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, dropout=0.2, batch_first=True)
        self.feed = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.2))
        self.back = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        x = x + 0.01 * torch.randn_like(x)
        fed: Tensor = x + self.back(self.feed(self.norm2(x)))
        return fed


def transformer() -> Case:
    """Tokens in, dropout everywhere."""
    blocks = [Block(8) for _ in range(3)]
    model = nn.Sequential(nn.Embedding(20, 8), nn.Dropout(0.1), *blocks, nn.Linear(8, 4))
    return Case(LayerSequence.of(model), torch.randint(20, (9, 5)), torch.randn(9, 5, 4))


class Head(nn.Module):
    """Reads tokens' scores off the embedding, whose weight it shares."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(embedding.embedding_dim)
        self.weight = embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(self.norm(x), self.weight)


def tied() -> Case:
    """A GPT with dropout, whose first and last layer share a weight."""
    embedding = nn.Embedding(20, 8)
    model = nn.Sequential(embedding, *(Block(8) for _ in range(3)), Head(embedding))
    return Case(LayerSequence.of(model), torch.randint(20, (9, 5)), torch.randn(9, 5, 20))


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.norm(self.conv(x)))


def resnet() -> Case:
    """BatchNorm in every layer but the last."""
    stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4, momentum=None))
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    model = nn.Sequential(stem, *(Residual(4) for _ in range(4)), head)
    return Case(LayerSequence.of(model), torch.randn(10, 3, 6, 6), torch.randn(10, 2))


def cut_plainly(batch: Any, sizes: list[int]) -> list[Any]:
    if isinstance(batch, dict):
        parts = {name: cut_plainly(item, sizes) for name, item in batch.items()}
        return [{name: part[i] for name, part in parts.items()} for i in range(len(sizes))]
    return list(torch.split(batch, sizes)) if isinstance(batch, Tensor) else [batch] * len(sizes)


def plain_loop(case: Case, num_microbatches: int) -> list[float]:
    """One device, one micro-batch after another: larger ones first, weighted by their size."""
    modules = nn.ModuleList(layer.module for layer in case.layers.layers)
    optimizer = torch.optim.AdamW(modules.parameters(), lr=1e-2)
    uses = untie(case)
    total = len(case.target)
    each, more = divmod(total, num_microbatches)
    sizes = [size for i in range(num_microbatches) if (size := each + (i < more))]
    losses = []
    for step in range(NUM_STEPS):
        parts = zip(cut_plainly(case.inputs, sizes), torch.split(case.target, sizes), strict=True)
        loss = 0.0
        for microbatch, (inputs, target) in enumerate(parts):
            part = mse_loss(case.output(inputs, step, microbatch), target) * (len(target) / total)
            part.backward()  # type: ignore[no-untyped-call]  # torch does not annotate it
            loss += float(part.detach())
        for first, second in uses:
            assert first.grad is not None
            assert second.grad is not None
            first.grad, second.grad = first.grad + second.grad, None
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    return losses


def untie(case: Case) -> list[tuple[Tensor, Tensor]]:
    """A head that shares its weight gets a double of it: each use gathers its own gradient."""
    embedding, head = (case.layers.layers[i].module for i in (0, -1))
    if not isinstance(embedding, nn.Embedding) or not isinstance(head, Head):
        return []
    head.weight = nn.Parameter(embedding.weight.detach())  # in the same memory
    return [(embedding.weight, head.weight)]


def pipelined(case: Case, **options: Any) -> list[float]:
    modules = nn.ModuleList(layer.module for layer in case.layers.layers)
    optimizer = torch.optim.AdamW(modules.parameters(), lr=1e-2)
    pipe = Pipeline(case.layers, mse_loss, seed=SEED, **options)
    losses = []
    for _ in range(NUM_STEPS):
        losses.append(float(pipe.step(case.inputs, case.target).loss))
        optimizer.step()
        optimizer.zero_grad()
    pipe.close()
    return losses


def assert_same_bits(make: Callable[[], Case], num_microbatches: int, **options: Any) -> None:
    torch.manual_seed(1)
    ours = make()
    theirs = copy.deepcopy(ours)
    expected = plain_loop(theirs, num_microbatches)
    losses = pipelined(ours, num_microbatches=num_microbatches, **options)
    assert losses == pytest.approx(expected, rel=1e-5)  # their sums are rounded differently
    for layer, other in zip(ours.layers.layers, theirs.layers.layers, strict=True):
        wanted = other.module.state_dict()
        for name, tensor in layer.module.state_dict().items():
            assert torch.equal(tensor, wanted[name]), f"{layer.name}.{name}"


@pytest.mark.parametrize("backend", ["serial", "threads"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("schedule", schedule_names())
def test_a_chain_trains_to_the_same_bits(schedule: str, num_ranks: int, backend: str) -> None:
    assert_same_bits(chain, 8, schedule=schedule, num_ranks=num_ranks, backend=backend)


@pytest.mark.parametrize("make", [unet, readers])
@pytest.mark.parametrize(
    ("schedule", "num_ranks"),
    [("gpipe", 3), ("1f1b", 2), ("1f1b", 4), ("interleaved_1f1b", 3), ("zb_h1", 4), ("zbv", 3)],
)
def test_skips_and_values_read_by_many_train_to_the_same_bits(
    make: Callable[[], Case], schedule: str, num_ranks: int
) -> None:
    assert_same_bits(make, 4, schedule=schedule, num_ranks=num_ranks)


@pytest.mark.parametrize("num_microbatches", [1, 5, 19, 32])
def test_any_number_of_micro_batches_trains_to_the_same_bits(num_microbatches: int) -> None:
    """19 samples: uneven pieces, and for 32 the last 13 micro-batches are left out."""
    assert_same_bits(chain, num_microbatches, schedule="zb_h1", num_ranks=3)


def test_an_order_made_by_hand_trains_to_the_same_bits() -> None:
    """A V of two ranks; micro-batch 0 goes back as a whole, micro-batch 1 in halves."""
    schedule = Schedule.from_text(
        "0F0 3F0 3B0 0F1 3F1 3I1 0B0 3W1 0I1 0W1", "1F0 2F0 2B0 1B0 1F1 2F1 2I1 1I1 2W1 1W1"
    )
    assert_same_bits(chain, 2, schedule=schedule, num_ranks=2)


@pytest.mark.parametrize("recompute", ["never", "always", "except_last"])
@pytest.mark.parametrize(
    ("schedule", "num_ranks", "backend"),
    [
        ("gpipe", 1, "serial"),
        ("gpipe", 3, "threads"),
        ("1f1b", 2, "serial"),
        ("1f1b", 4, "threads"),
        ("zb_h2", 3, "threads"),
        ("zbv", 2, "threads"),
        ("interleaved_1f1b", 2, "threads"),
    ],
)
def test_dropout_and_recomputation_change_no_bit(
    schedule: str, num_ranks: int, backend: str, recompute: str
) -> None:
    options = {"num_ranks": num_ranks, "backend": backend, "recompute": recompute}
    assert_same_bits(transformer, 4, schedule=schedule, **options)


@pytest.mark.parametrize("make", [unet, readers])
def test_recomputation_of_some_stages_changes_no_bit(make: Callable[[], Case]) -> None:
    modes = ["always", "never", "except_last"]
    assert_same_bits(make, 4, schedule="zb_h1", num_ranks=3, recompute=modes)


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize(("schedule", "num_ranks"), [("1f1b", 1), ("1f1b", 3), ("zbv", 3)])
def test_batch_norm_of_each_micro_batch_keeps_the_statistics_of_a_plain_loop(
    schedule: str, num_ranks: int, recompute: str
) -> None:
    options = {"num_ranks": num_ranks, "recompute": recompute, "batch_norm": "microbatch"}
    assert_same_bits(resnet, 4, schedule=schedule, **options)


@pytest.mark.parametrize(
    ("schedule", "num_ranks", "backend"),
    [
        ("gpipe", 1, "serial"),
        ("1f1b", 2, "threads"),
        ("1f1b", 4, "threads"),
        ("zb_h1", 3, "threads"),
        ("zbv", 2, "threads"),
    ],
)
def test_a_weight_shared_by_the_first_and_last_layer_trains_to_the_same_bits(
    schedule: str, num_ranks: int, backend: str
) -> None:
    assert_same_bits(tied, 4, schedule=schedule, num_ranks=num_ranks, backend=backend)


def test_layers_that_share_a_module_are_refused() -> None:
    shared = nn.Linear(4, 4)
    with pytest.raises(ModelError, match=r"^layers '0' and '2' contain the same module, a Linear"):
        Pipeline([shared, nn.ReLU(), shared], mse_loss, num_ranks=3, num_microbatches=2)
