"""Gradients cross a stage border with the strides and sums of an uncut model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss, relu
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import stageline as sl
from stageline.model.layers import Layer, LayerSequence
from stageline.pipeline import Pipeline
from stageline.runtime.exactness.strided_copy import exact_copy, misalignment, share_memory
from stageline.zoo.cases import grouped

SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zbv")
Case = tuple[list[nn.Module | Layer], Tensor, Tensor]


class Calling(nn.Module):
    """A layer of one function."""

    def __init__(self, function: Callable[..., object], *parts: nn.Module) -> None:
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(parts)

    def forward(self, *values: object) -> object:
        return self.function(*self.parts, *values)


def residual_around_permute() -> Case:
    def mixed(norm: nn.Module, linear: nn.Module, x: Tensor) -> Tensor:
        return x + torch.as_tensor(linear(norm(x).transpose(1, 2))).transpose(1, 2)

    blocks = [Calling(mixed, nn.LayerNorm(12), nn.Linear(9, 9)) for _ in range(8)]
    return [*blocks], torch.randn(8, 9, 12), torch.randn(8, 9, 12)


def channels_last() -> Case:
    def begun(conv: nn.Module, x: Tensor) -> Tensor:
        return torch.as_tensor(conv(x.contiguous(memory_format=torch.channels_last)))

    def block(conv: nn.Module, norm: nn.Module, x: Tensor) -> Tensor:
        return relu(norm(conv(x))) + x

    blocks = [Calling(block, nn.Conv2d(6, 6, 3, padding=1), nn.GroupNorm(2, 6)) for _ in range(7)]
    first = Calling(begun, nn.Conv2d(3, 6, 3, padding=1))
    return [first, *blocks], torch.randn(8, 3, 7, 7), torch.randn(8, 6, 7, 7)


def recurrent_on_varying_lengths() -> Case:
    lengths = torch.tensor([5, 4, 2, 5, 3, 1, 4, 2])

    def run(rnn: nn.Module, x: Tensor) -> Tensor:
        own = lengths[: len(x)]
        packed = pack_padded_sequence(x, own, batch_first=True, enforce_sorted=False)
        padded, _ = pad_packed_sequence(rnn(packed)[0], batch_first=True, total_length=5)
        return padded

    gru = [Calling(run, nn.GRU(6, 6, batch_first=True)) for _ in range(3)]
    linear = [nn.Linear(6, 6) for _ in range(5)]
    layers: list[nn.Module | Layer] = [linear[0], gru[0], *linear[1:3], gru[1], linear[3], gru[2]]
    return [*layers, linear[4]], torch.randn(8, 5, 6), torch.randn(8, 5, 6)


def attention_and_in_place() -> Case:
    def attend(attention: nn.Module, x: Tensor) -> Tensor:
        return x + torch.as_tensor(attention(x, x, x, need_weights=False)[0]).mul_(0.5)

    blocks: list[nn.Module | Layer] = []
    for _ in range(4):
        blocks += [Calling(attend, nn.MultiheadAttention(8, 2, batch_first=True)), nn.ReLU(True)]
    return blocks, torch.randn(8, 6, 8), torch.randn(8, 6, 8)


def sums_that_are_expanded() -> Case:
    """The gradient of a sum has stride 0."""

    def pooled(linear: nn.Module, x: Tensor) -> Tensor:
        return torch.as_tensor(linear(x + x.sum(1, keepdim=True)))

    blocks = [Calling(pooled, nn.Linear(7, 7)) for _ in range(7)]
    last = Calling(lambda linear, x: linear(x).sum(1), nn.Linear(7, 7))
    return [*blocks, last], torch.randn(8, 5, 7), torch.randn(8, 7)


def slices_with_gaps() -> Case:
    """Every other column, or half of each row, is sent."""

    def halved(linear: nn.Module, x: Tensor) -> Tensor:
        return torch.as_tensor(linear(x))[..., 3:14]

    def striding(linear: nn.Module, x: Tensor) -> Tensor:
        return torch.as_tensor(linear(x))[..., ::2]

    blocks = [
        Calling(function, nn.Linear(11, size))
        for _ in range(4)
        for function, size in ((halved, 17), (striding, 22))
    ]
    return [*blocks], torch.randn(8, 13, 11), torch.randn(8, 13, 11)


BORDERS = [
    residual_around_permute,
    channels_last,
    recurrent_on_varying_lengths,
    attention_and_in_place,
    sums_that_are_expanded,
    slices_with_gaps,
]


@pytest.mark.parametrize("make", BORDERS, ids=lambda make: make.__name__)
def test_gradients_keep_their_strides_at_a_border(make: Callable[[], Case]) -> None:
    """Each under two schedules in turn, and under those that cut differently from them."""
    turn = BORDERS.index(make) % len(SCHEDULES)
    ways = [(schedule, "serial", "never") for schedule in (SCHEDULES * 2)[turn : turn + 2]]
    ways += [("1f1b", "threads", "always"), ("zbv", "threads", "never")]
    for schedule, backend, recompute in ways:
        torch.manual_seed(3)
        layers, x, y = make()
        options: dict[str, Any] = {"num_ranks": 4, "num_microbatches": 8, "schedule": schedule}
        pipe = Pipeline(layers, mse_loss, backend=backend, recompute=recompute, **grouped(options))
        for _ in range(2):  # the second time layers that work in place are known
            pipe.verify(x, y)
        pipe.close()


class Cross(nn.Module):
    """Computes keys and values of one encoder output, as each decoder layer does."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.value = nn.Linear(8, 8), nn.Linear(8, 8)
        self.query, self.out = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        weights = self.query(x) @ self.key(memory).transpose(1, 2)
        return x + torch.as_tensor(self.out(weights.softmax(-1) @ self.value(memory)))


def cross_attention(count: int = 8) -> LayerSequence:
    encoder = Layer("encoder", nn.Linear(8, 8), ("source",), ("memory",))
    decoders = [Layer(f"decoder.{i}", Cross(), ("x", "memory")) for i in range(count)]
    return LayerSequence((encoder, *decoders))


class Biased(nn.Module):
    """Reads the bias three times, as a value and through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        return torch.tanh(self.linear(x + bias)) * bias.view_as(bias) + bias * 0.3


def bias_of_all_layers() -> LayerSequence:
    """A bias that one layer writes and all read, as T5's relative positions."""
    first = Layer("positions", nn.Linear(8, 8), ("x",), ("bias",))
    return LayerSequence((first, *(Layer(f"block.{i}", Biased(), ("x", "bias")) for i in range(8))))


@pytest.mark.parametrize("schedule", sl.schedule_names(synchronous=True))
def test_a_value_with_several_readers_that_use_it_more_than_once(schedule: str) -> None:
    torch.manual_seed(4)
    inputs = {"x": torch.randn(8, 5, 8), "source": torch.randn(8, 6, 8)}
    target = torch.randn(8, 5, 8)
    options: dict[str, Any] = {"num_ranks": 4, "num_microbatches": 8, "schedule": schedule}
    Pipeline(cross_attention(), mse_loss, backend="serial", **grouped(options)).verify(
        inputs, target
    )
    pipe = Pipeline(bias_of_all_layers(), mse_loss, backend="threads", **grouped(options))
    pipe.verify(inputs["x"], target)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "interleaved_1f1b"])
def test_gradients_of_an_input_that_all_stages_read_are_those_of_a_plain_loop(
    schedule: str,
) -> None:
    torch.manual_seed(5)
    blocks = [Layer(f"block.{i}", Biased(), ("x", "bias")) for i in range(8)]
    layers = LayerSequence(tuple(blocks))
    plain = layers.copy()
    x, bias, target = torch.randn(8, 5, 8), torch.randn(8, 5, 8), torch.randn(8, 5, 8)
    x.requires_grad_()
    bias.requires_grad_()
    pipe = Pipeline(layers, mse_loss, num_ranks=4, num_microbatches=4, schedule=schedule)
    pipe.step(x, target, bias=bias)
    found = taken(x), taken(bias)
    parts = zip(*(torch.split(tensor, 2) for tensor in (x, bias, target)), strict=True)
    losses = []
    for part, bias_part, wanted in parts:
        value = part
        for layer in plain:
            value = layer.module(value, bias_part)
        losses.append(mse_loss(value, wanted) * 0.25)
    torch.autograd.backward(losses)
    assert torch.equal(found[0], taken(x))
    assert torch.equal(found[1], taken(bias))


def taken(tensor: Tensor) -> Tensor:
    """Return the gradient of a tensor, and set it to None."""
    gradient, tensor.grad = tensor.grad, None
    assert gradient is not None
    return gradient


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(4, 6).t(),
        lambda: torch.randn(5, 9)[1:4, 2:8:3],
        lambda: torch.randn(4, 1, 3).expand(4, 5, 3),
        lambda: torch.randn(20).as_strided((6, 5), (2, 1)),
        lambda: torch.randn(3, 0),
        lambda: torch.tensor(2.0),
        lambda: torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
    ],
    ids=["transposed", "a slice", "expanded", "overlapping", "empty", "a number", "channels last"],
)
def test_an_exact_copy_has_values_strides_and_alignment(make: Callable[[], Tensor]) -> None:
    tensor = make()
    copied = exact_copy(tensor)
    assert torch.equal(copied, tensor)
    assert not share_memory(copied, tensor)
    if tensor.stride() != (2, 1):  # memory that overlaps in itself becomes dense
        assert copied.stride() == tensor.stride()
        assert misalignment(copied) == misalignment(tensor)


def test_tensors_share_memory_only_if_they_share_an_element() -> None:
    rows = torch.zeros(4, 6)
    assert share_memory(rows, rows[1:2])
    assert share_memory(rows[:, ::2], rows[2])
    assert not share_memory(rows[:, :3], rows[:, 3:])
    assert not share_memory(rows[:, ::2], rows[:, 1::2])
    assert not share_memory(rows[:2], rows[2:])
    assert not share_memory(rows, torch.zeros(4, 6))
    assert share_memory(rows.view(torch.int32), rows[3, 5:])
