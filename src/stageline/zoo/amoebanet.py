"""AmoebaNet-D, GPipe's image classifier: every cell reads the outputs of the two cells before it.

    x ─► stem ─► reduction.0 ─► reduction.1 ─► normal.0 ─► normal.1 ─► … ─► head ─► x
          └───────────┼───────────────┘            │           │
                      └────────────────────────────┘           …

The cells are from Real et al., arXiv 1802.01548; the sizes from GPipe, arXiv 1811.06965, table 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from stageline.model.layers import Layer, LayerSequence

Operation = Literal["none", "1x1", "3x3", "1x7 7x1", "max 2x2", "max 3x3", "avg 3x3"]


class Use(NamedTuple):
    """An operation on one of a cell's states."""

    operation: Operation
    state: int


class Genotype(NamedTuple):
    """The structure of a cell.

    State 0 is the output of the previous cell, and state 1 that of the cell before it. Each pair of
    operations adds up to the next state.
    """

    pairs: tuple[tuple[Use, Use], ...]
    joined: tuple[int, ...]  # the states that are concatenated to the output
    stride: int  # of operations on states 0 and 1


NORMAL = Genotype(
    pairs=(
        (Use("1x1", 1), Use("max 3x3", 1)),
        (Use("none", 1), Use("1x7 7x1", 0)),
        (Use("1x1", 0), Use("1x7 7x1", 0)),
        (Use("max 3x3", 2), Use("none", 2)),
        (Use("avg 3x3", 1), Use("1x1", 5)),
    ),
    # The paper concatenates the states that nothing reads: 3, 4 and 6. TensorFlow's reference code
    # adds state 0, and so must GPipe: without it there are 12 to 14 % fewer parameters than in
    # table 1.
    joined=(0, 3, 4, 6),
    stride=1,
)
REDUCTION = Genotype(
    pairs=(
        (Use("max 2x2", 0), Use("max 3x3", 0)),
        (Use("none", 2), Use("3x3", 1)),
        (Use("1x7 7x1", 2), Use("max 3x3", 2)),
        (Use("none", 3), Use("max 2x2", 1)),
        (Use("avg 3x3", 2), Use("1x1", 3)),
    ),
    joined=(4, 5, 6),
    stride=2,
)


class FeatureMap(NamedTuple):
    """An output of a cell or the stem, which later cells read."""

    name: str
    channels: int
    num_halvings: int  # of the image's sides, so far


def amoebanet_d(
    num_classes: int = 1000, num_layers: int = 18, num_filters: int = 256
) -> LayerSequence:
    """Return a model with `num_layers` normal cells.

    `num_filters`, a multiple of 16, is the width of the first of them.

    >>> layers = amoebanet_d(num_classes=10, num_layers=3, num_filters=16)
    >>> [layer.name for layer in layers][:6]
    ['stem', 'reduction.0', 'reduction.1', 'normal.0', 'reduction.2', 'normal.1']
    >>> layers.layers[5].reads
    ('normal.0', 'reduction.2')
    """
    channels = num_filters // 4
    conv = nn.Conv2d(3, channels, kernel_size=3, stride=2, padding=1, bias=False)
    stem = nn.Sequential(conv, nn.BatchNorm2d(channels))
    layers = [Layer("stem", stem, writes=("stem",))]
    earlier = latest = FeatureMap("stem", channels, num_halvings=1)
    for name, genotype, width in _cells(num_layers, num_filters):
        cell = Cell(genotype, earlier, latest, width)
        layers.append(Layer(name, cell, reads=(earlier.name, latest.name), writes=(name,)))
        num_halvings = latest.num_halvings + (genotype is REDUCTION)
        earlier, latest = latest, FeatureMap(name, width * len(genotype.joined), num_halvings)
    linear = nn.Linear(latest.channels, num_classes)
    head = nn.Sequential(nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), linear)
    return LayerSequence((*layers, Layer("head", head, reads=(latest.name,))))


def _cells(num_layers: int, num_filters: int) -> Iterator[tuple[str, Genotype, int]]:
    """Yield name, genotype and width: two reductions, then normal cells with two more between."""
    yield "reduction.0", REDUCTION, num_filters // 4
    yield "reduction.1", REDUCTION, num_filters // 2
    for third in range(3):
        width = num_filters * 2**third
        if third:
            yield f"reduction.{third + 1}", REDUCTION, width
        for number in range(num_layers * third // 3, num_layers * (third + 1) // 3):
            yield f"normal.{number}", NORMAL, width


class Cell(nn.Module):
    """A cell: projects both inputs to one size and applies the operations of its genotype."""

    def __init__(
        self, genotype: Genotype, earlier: FeatureMap, latest: FeatureMap, width: int
    ) -> None:
        super().__init__()
        self.earlier = _projection(earlier, latest.num_halvings, width)
        self.latest = _convolution(latest.channels, width)
        self.pairs = nn.ModuleList(Pair(*pair, width, genotype.stride) for pair in genotype.pairs)
        self.joined = genotype.joined

    def forward(self, earlier: Tensor, latest: Tensor) -> Tensor:
        states = [self.latest(latest), self.earlier(earlier)]
        for pair in self.pairs:
            states.append(pair(states))
        return torch.cat([states[number] for number in self.joined], dim=1)


class Pair(nn.Module):
    """The sum of two operations on states of a cell."""

    def __init__(self, left: Use, right: Use, width: int, stride: int) -> None:
        super().__init__()
        self.states = left.state, right.state
        strides = [stride if state < 2 else 1 for state in self.states]
        self.left = _operation(left.operation, width, strides[0])
        self.right = _operation(right.operation, width, strides[1])

    def forward(self, states: list[Tensor]) -> Tensor:
        left, right = (states[number] for number in self.states)
        added: Tensor = self.left(left) + self.right(right)
        return added


class Halve(nn.Module):
    """A factorized reduction: half of the channels see even pixels, half see odd ones."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.here = nn.Conv2d(before, after // 2, kernel_size=1, stride=2, bias=False)
        self.next = nn.Conv2d(before, after // 2, kernel_size=1, stride=2, bias=False)
        self.norm = nn.BatchNorm2d(after)

    def forward(self, x: Tensor) -> Tensor:
        x = x.relu()
        shifted = nn.functional.pad(x, (-1, 1, -1, 1))
        halved: Tensor = self.norm(torch.cat([self.here(x), self.next(shifted)], dim=1))
        return halved


def _projection(source: FeatureMap, num_halvings: int, width: int) -> nn.Module:
    if source.num_halvings < num_halvings:
        return Halve(source.channels, width)
    return nn.Identity() if source.channels == width else _convolution(source.channels, width)


def _operation(name: Operation, width: int, stride: int) -> nn.Module:
    """Return the module for an operation; none and 1x1 never read an input that is halved."""
    match name:
        case "none":
            return nn.Identity()
        case "1x1":
            return _convolution(width, width)
        case "3x3":
            return _bottleneck(width, [(3, 3)], stride)
        case "1x7 7x1":
            return _bottleneck(width, [(1, 7), (7, 1)], stride)
        case "max 2x2":
            return nn.MaxPool2d(2, stride, ceil_mode=True)  # rounds odd sizes as the others do
        case "max 3x3":
            return nn.MaxPool2d(3, stride, padding=1)
        case "avg 3x3":
            return nn.AvgPool2d(3, stride, padding=1, count_include_pad=False)


def _bottleneck(width: int, kernels: list[tuple[int, int]], stride: int) -> nn.Sequential:
    """Return convolutions on a quarter of the channels, between two 1x1 convolutions."""
    inner = width // 4
    middle = [_convolution(inner, inner, kernel, stride) for kernel in kernels]
    return nn.Sequential(_convolution(width, inner), *middle, _convolution(inner, width))


def _convolution(
    before: int, after: int, kernel: tuple[int, int] = (1, 1), stride: int = 1
) -> nn.Sequential:
    """Return ReLU, convolution and BatchNorm; kernel sides of one pixel have no stride."""
    down, across = (stride if side > 1 else 1 for side in kernel)
    padding = kernel[0] // 2, kernel[1] // 2
    conv = nn.Conv2d(before, after, kernel, (down, across), padding, bias=False)
    return nn.Sequential(nn.ReLU(), conv, nn.BatchNorm2d(after))
