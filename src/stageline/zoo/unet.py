"""A small U-Net: what the way down writes is read again on the way up, the first of it last.

x ─► down.0 ─► down.1 ─► down.2 ─► bottom ─► up.2 ─► up.1 ─► up.0 ─► head ─► x
        │         │         └───── skip.2 ─────┘       │       │
        │         └─────────────── skip.1 ─────────────┘       │
        └───────────────────────── skip.0 ─────────────────────┘
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stageline.model.layers import Layer, LayerSequence


def unet(channels: int, classes: int, width: int, depth: int = 3) -> LayerSequence:
    """`2 * depth + 2` layers; images are halved `depth` times, and `width` doubles each time.

    >>> [layer.name for layer in unet(channels=3, classes=2, width=4, depth=1)]
    ['down.0', 'bottom', 'up.0', 'head']
    """
    widths = [width * 2**level for level in range(depth + 1)]
    down = [
        Layer(f"down.{level}", Down(before, after), writes=("x", f"skip.{level}"))
        for level, (before, after) in enumerate(zip([channels, *widths], widths[:-1], strict=False))
    ]
    up = [
        Layer(f"up.{level}", Up(widths[level + 1], widths[level]), reads=("x", f"skip.{level}"))
        for level in reversed(range(depth))
    ]
    bottom = Layer("bottom", Convolve(widths[-2], widths[-1]))
    head = Layer("head", nn.Conv2d(width, classes, kernel_size=1))
    return LayerSequence((*down, bottom, *up, head))


class Convolve(nn.Sequential):
    """A convolution that keeps the size, normalised without a look at other samples."""

    def __init__(self, before: int, after: int) -> None:
        conv = nn.Conv2d(before, after, kernel_size=3, padding=1)
        super().__init__(conv, nn.GroupNorm(2, after), nn.ReLU())


class Down(nn.Module):
    """Half the size goes on, the whole is kept for the way up."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.convolve = Convolve(before, after)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        skip: Tensor = self.convolve(x)
        return nn.functional.max_pool2d(skip, 2), skip


class Up(nn.Module):
    """Twice the size, beside what was kept on the way down."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.enlarge = nn.ConvTranspose2d(before, after, kernel_size=2, stride=2)
        self.convolve = Convolve(2 * after, after)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        joined: Tensor = self.convolve(torch.cat([self.enlarge(x), skip], dim=1))
        return joined
