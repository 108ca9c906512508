"""From the partitions of a `GPipe` to Stageline's layers: skips become values that layers name.

    partition 0        partition 1       partition 2
    Encode ──── x ────► Middle ──── x ────► Decode
        └──────────── skip trunk ─────────────┘

A skip goes straight from the partition that stashes it to the one that pops it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from stageline.model.layers import CHAIN, Layer
from stageline.torch_private import has_hooks
from stageline.torchgpipe.skip.scope import SkipKey, skip_scope
from stageline.torchgpipe.skip.skippable import Skippable


class SkipLayer(nn.Module):
    """Passes the skips of a module in as further inputs, and out as further outputs."""

    def __init__(self, inner: nn.Module, pops: list[SkipKey], stashes: list[SkipKey]) -> None:
        super().__init__()
        self.inner, self.pops, self.stashes = inner, tuple(pops), tuple(stashes)

    def forward(self, x: Any, *popped: Tensor | None) -> Any:
        with skip_scope(dict(zip(self.pops, popped, strict=True))) as waiting:
            output = self.inner(x)
        return (output, *(waiting[key] for key in self.stashes)) if self.stashes else output


def layers_of(partitions: Iterable[nn.Module]) -> tuple[list[Layer], list[int]]:
    """Return the layers of all partitions, and the number of layers in each.

    A partition with hooks of its own is one layer, so that they are called.
    """
    found: list[Layer] = []
    balance: list[int] = []
    namespaces: dict[object, int] = {}
    for number, partition in enumerate(partitions):
        parts = partition.named_children()
        if has_hooks(partition):
            parts = iter([(f"partitions.{number}", partition)])
        new = [_layer(name, module, namespaces) for name, module in parts]
        found += new
        balance.append(len(new))
    return found, balance


def follow_modes(layers: Iterable[Layer]) -> None:
    """Give wrappers the training mode of what they wrap: the runtime asks a layer's module."""
    for layer in layers:
        if isinstance(layer.module, SkipLayer):
            layer.module.training = layer.module.inner.training


def _layer(name: str, module: nn.Module, namespaces: dict[object, int]) -> Layer:
    pops, stashes = _skips(module)
    if not any(isinstance(part, Skippable) for part in module.modules()):
        return Layer(name, module)

    def named(keys: Iterable[SkipKey]) -> Iterator[str]:
        for key in keys:
            number = namespaces.setdefault(key.namespace, len(namespaces))
            yield f"skip {key.name} of namespace {number}"

    reads, writes = (CHAIN, *named(pops)), (CHAIN, *named(stashes))
    return Layer(name, SkipLayer(module, pops, stashes), reads, writes)


def _skips(module: nn.Module) -> tuple[list[SkipKey], list[SkipKey]]:
    """Return the skips that enter a module, and those that leave it."""
    pops: list[SkipKey] = []
    stashes: dict[SkipKey, None] = {}
    for part in module.modules():
        if isinstance(part, Skippable):
            for key in part.poppable():
                if key in stashes:
                    del stashes[key]
                else:
                    pops.append(key)
            stashes |= dict.fromkeys(part.stashable())
    return pops, [*stashes]
