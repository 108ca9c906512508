"""A small U-Net: each level of the encoder has a skip connection to the same level of the decoder.

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
    """Return `2 * depth + 2` layers; each of `depth` levels halves images and doubles `width`.

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
    """A convolution that keeps the size, with GroupNorm and ReLU."""

    def __init__(self, before: int, after: int) -> None:
        conv = nn.Conv2d(before, after, kernel_size=3, padding=1)
        super().__init__(conv, nn.GroupNorm(2, after), nn.ReLU())


class Down(nn.Module):
    """An encoder level: passes on half the size, and the full size as skip connection."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.convolve = Convolve(before, after)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        skip: Tensor = self.convolve(x)
        return nn.functional.max_pool2d(skip, 2), skip


class Up(nn.Module):
    """A decoder level: doubles the size and joins the skip connection."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.enlarge = nn.ConvTranspose2d(before, after, kernel_size=2, stride=2)
        self.convolve = Convolve(2 * after, after)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        joined: Tensor = self.convolve(torch.cat([self.enlarge(x), skip], dim=1))
        return joined
