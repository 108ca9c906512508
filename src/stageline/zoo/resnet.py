"""A small ResNet with BatchNorm after every convolution and in-place ReLUs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import Tensor, nn

from stageline.model.layers import LayerSequence


def resnet(channels: int, classes: int, width: int, blocks: Sequence[int]) -> LayerSequence:
    """Return a ResNet with `blocks[i]` blocks at the i-th size; the width doubles with each size.

    The stem and the head consist of several layers, so a stage may end between a convolution and
    its BatchNorm.

    >>> [layer.name for layer in resnet(channels=3, classes=2, width=4, blocks=[1, 1])]
    ['stem.0', 'stem.1', 'stem.2', 'blocks.0', 'blocks.1', 'head.0', 'head.1', 'head.2']
    """
    widths = [width * 2**size for size, count in enumerate(blocks) for _ in range(count)]
    body = [Residual(a, b) for a, b in zip([width, *widths], widths, strict=False)]
    linear = nn.Linear(widths[-1], classes)
    parts = {
        "stem": nn.Sequential(*_normed(channels, width), nn.ReLU(inplace=True)),
        "blocks": nn.Sequential(*body),
        "head": nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), linear),
    }
    return LayerSequence.of(nn.Sequential(OrderedDict(parts)))


class Residual(nn.Module):
    """Two convolutions with a shortcut; a block that widens the channels halves the image."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        stride = 1 if before == after else 2
        first, second = _normed(before, after, stride), _normed(after, after)
        self.body = nn.Sequential(*first, nn.ReLU(inplace=True), *second)
        shortcut = _normed(before, after, stride, kernel_size=1)
        self.shortcut = nn.Identity() if before == after else nn.Sequential(*shortcut)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.relu(self.body(x) + self.shortcut(x))
        return result


def _normed(before: int, after: int, stride: int = 1, kernel_size: int = 3) -> list[nn.Module]:
    padding = kernel_size // 2
    conv = nn.Conv2d(before, after, kernel_size, stride=stride, padding=padding, bias=False)
    return [conv, nn.BatchNorm2d(after)]
