"""AmoebaNet-B and -D, GPipe's image classifiers: a cell reads the outputs of the two before it.

    x ─► stem ─► reduction.0 ─► reduction.1 ─► normal.0 ─► normal.1 ─► … ─► head ─► x
          └───────────┼───────────────┘            │           │              │
                      └────────────────────────────┘           …  auxiliary ──┘

The cells are from Real et al., arXiv 1802.01548, in the numbering of TensorFlow's reference code;
the sizes from GPipe, arXiv 1811.06965, table 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from stageline.model.layers import Layer, LayerSequence

Pooling = Literal["max 2x2", "max 3x3", "avg 3x3"]
Convolution = Literal["1x1", "3x3", "1x7 7x1", "separable 3x3", "dilated 5x5"]
Operation = Literal["none"] | Convolution | Pooling
Stem = Literal["imagenet", "small"]


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


# B has the structure of D, but for two inputs, and separable convolutions in place of most others.
NORMAL_B = Genotype(
    pairs=(
        (Use("1x1", 1), Use("max 3x3", 1)),
        (Use("none", 1), Use("separable 3x3", 0)),
        (Use("1x1", 1), Use("separable 3x3", 0)),
        (Use("1x1", 2), Use("none", 2)),
        (Use("avg 3x3", 1), Use("1x1", 5)),
    ),
    joined=(0, 3, 4, 6),  # with state 0, as above
    stride=1,
)
REDUCTION_B = Genotype(
    pairs=(
        (Use("max 2x2", 0), Use("max 3x3", 0)),
        (Use("none", 2), Use("3x3", 1)),
        (Use("dilated 5x5", 2), Use("max 3x3", 2)),
        (Use("none", 3), Use("separable 3x3", 1)),
        (Use("avg 3x3", 4), Use("1x1", 3)),
    ),
    joined=(5, 6),
    stride=2,
)


class Cells(NamedTuple):
    """The two cells of an AmoebaNet."""

    normal: Genotype
    reduction: Genotype


B = Cells(NORMAL_B, REDUCTION_B)
D = Cells(NORMAL, REDUCTION)


class FeatureMap(NamedTuple):
    """An output of a cell or the stem, which later cells read."""

    name: str
    channels: int
    num_halvings: int  # of the image's sides, so far


def amoebanet_d(
    num_classes: int = 1000, num_layers: int = 18, num_filters: int = 256
) -> LayerSequence:
    """Return AmoebaNet-D with `num_layers` normal cells, for images of ImageNet.

    `num_filters`, a multiple of 16, is the width of the first of them.

    >>> layers = amoebanet_d(num_classes=10, num_layers=3, num_filters=16)
    >>> [layer.name for layer in layers][:6]
    ['stem', 'reduction.0', 'reduction.1', 'normal.0', 'reduction.2', 'normal.1']
    >>> layers.layers[5].reads
    ('normal.0', 'reduction.2')
    """
    return amoebanet(D, num_classes, num_layers, num_filters)


def amoebanet(
    cells: Cells,
    num_classes: int,
    num_layers: int,
    num_filters: int,
    *,
    stem: Stem = "imagenet",
    image_channels: int = 3,
    has_auxiliary_head: bool = False,
) -> LayerSequence:
    """Return a model of these cells, `B` or `D`.

    The stem "imagenet" halves images three times, by its stride and by two reduction cells; "small"
    keeps their size, as the versions for CIFAR do. With an auxiliary head the output is a pair: the
    logits, and those of a classifier on the last cell before the last reduction.

    >>> layers = amoebanet(B, 10, 3, 16, stem="small", has_auxiliary_head=True)
    >>> [layer.name for layer in layers]
    ['stem', 'normal.0', 'reduction.0', 'normal.1', 'auxiliary', 'reduction.1', 'normal.2', 'head']
    >>> layers.layers[-1].reads
    ('normal.2', 'auxiliary')
    """
    earlier = latest = _stem_output(stem, num_filters)
    layers = [Layer("stem", _stem(stem, image_channels, latest.channels), writes=("stem",))]
    for name, genotype, width in _cells(cells, num_layers, num_filters, stem):
        if has_auxiliary_head and width == num_filters * 4 and genotype is cells.reduction:
            head = AuxiliaryHead(latest.channels, num_filters, num_classes)
            layers.append(Layer("auxiliary", head, (latest.name,), ("auxiliary",)))
        cell = Cell(genotype, earlier, latest, width)
        layers.append(Layer(name, cell, reads=(earlier.name, latest.name), writes=(name,)))
        num_halvings = latest.num_halvings + (genotype is cells.reduction)
        earlier, latest = latest, FeatureMap(name, width * len(genotype.joined), num_halvings)
    return LayerSequence((*layers, _head(latest, num_classes, has_auxiliary_head)))


def _stem_output(stem: Stem, num_filters: int) -> FeatureMap:
    if stem == "imagenet":
        return FeatureMap("stem", num_filters // 4, num_halvings=1)
    return FeatureMap("stem", num_filters, num_halvings=0)


def _stem(stem: Stem, before: int, after: int) -> nn.Sequential:
    stride = 2 if stem == "imagenet" else 1
    conv = nn.Conv2d(before, after, kernel_size=3, stride=stride, padding=1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(after))


def _head(latest: FeatureMap, num_classes: int, has_auxiliary_head: bool) -> Layer:
    linear = nn.Linear(latest.channels, num_classes)
    head = nn.Sequential(nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), linear)
    if has_auxiliary_head:
        return Layer("head", HeadWithAuxiliary(*head), reads=(latest.name, "auxiliary"))
    return Layer("head", head, reads=(latest.name,))


def _cells(
    cells: Cells, num_layers: int, num_filters: int, stem: Stem
) -> Iterator[tuple[str, Genotype, int]]:
    """Yield name, genotype and width: those of the stem, then normal cells with two reductions."""
    num_reductions = 0
    if stem == "imagenet":
        yield "reduction.0", cells.reduction, num_filters // 4
        yield "reduction.1", cells.reduction, num_filters // 2
        num_reductions = 2
    for third in range(3):
        width = num_filters * 2**third
        if third:
            yield f"reduction.{num_reductions + third - 1}", cells.reduction, width
        for number in range(num_layers * third // 3, num_layers * (third + 1) // 3):
            yield f"normal.{number}", cells.normal, width


class HeadWithAuxiliary(nn.Sequential):
    """A classifier that returns the logits of the auxiliary head beside its own."""

    def forward(  # type: ignore[override]  # it reads two values
        self, x: Tensor, auxiliary: Tensor
    ) -> tuple[Tensor, Tensor]:
        for module in self:
            x = module(x)
        return x, auxiliary


class AuxiliaryHead(nn.Sequential):
    """A classifier on a cell in the middle, whose loss counts less than that of the head.

    TensorFlow's reference code pools by 5x5 in steps of 3 pixels, and then has 128 and 768 channels
    at 256 filters. Here the pooled map has 2x2 pixels for images of every size.
    """

    def __init__(self, before: int, num_filters: int, num_classes: int) -> None:
        narrow, wide = num_filters // 2, num_filters * 3
        super().__init__(
            *(nn.ReLU(), nn.AdaptiveAvgPool2d(2)),
            *(nn.Conv2d(before, narrow, kernel_size=1, bias=False), nn.BatchNorm2d(narrow)),
            *(nn.ReLU(), nn.Conv2d(narrow, wide, kernel_size=2, bias=False)),
            *(nn.BatchNorm2d(wide), nn.ReLU(), nn.Flatten(), nn.Linear(wide, num_classes)),
        )


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
        case "separable 3x3":
            return _separable(width, 3, stride, dilation=1)
        case "dilated 5x5":  # the reference code has the name, but leaves the dilation out
            return _separable(width, 5, stride, dilation=2)
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


def _separable(width: int, side: int, stride: int, dilation: int) -> nn.Sequential:
    """Return two separable convolutions, each depthwise and 1x1; the first one has the stride."""
    padding = side // 2 * dilation
    modules: list[nn.Module] = []
    for step in (stride, 1):
        depthwise = nn.Conv2d(width, width, side, step, padding, dilation, groups=width, bias=False)
        pointwise = nn.Conv2d(width, width, kernel_size=1, bias=False)
        modules += [nn.ReLU(), depthwise, pointwise, nn.BatchNorm2d(width)]
    return nn.Sequential(*modules)


def _convolution(
    before: int, after: int, kernel: tuple[int, int] = (1, 1), stride: int = 1
) -> nn.Sequential:
    """Return ReLU, convolution and BatchNorm; kernel sides of one pixel have no stride."""
    down, across = (stride if side > 1 else 1 for side in kernel)
    padding = kernel[0] // 2, kernel[1] // 2
    conv = nn.Conv2d(before, after, kernel, (down, across), padding, bias=False)
    return nn.Sequential(nn.ReLU(), conv, nn.BatchNorm2d(after))
