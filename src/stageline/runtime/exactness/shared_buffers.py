"""Refuse buffers and running statistics that layers of several stages share and change."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from stageline.errors import ModelError
from stageline.model.layers import LayerSequence
from stageline.torch_private import NormBase


def check_shared_norms(layers: LayerSequence, parts: Sequence[range]) -> None:
    """Raise ModelError if stages would update the running statistics of one module concurrently."""
    owners: dict[nn.Module, tuple[int, str]] = {}
    for stage, numbers in enumerate(parts):
        for layer in layers.layers[numbers.start : numbers.stop]:
            for module in layer.module.modules():
                first, name = owners.setdefault(module, (stage, layer.name))
                is_updated = isinstance(module, NormBase) and module.track_running_stats
                if first != stage and is_updated:
                    raise ModelError(
                        f"layers {name!r} and {layer.name!r} are in different stages and share a "
                        f"{type(module).__name__}, but its running statistics would be updated in "
                        "another order than by a plain loop: give each its own, or put these "
                        "layers into one stage with balance="
                    )


class SharedBuffers:
    """Buffers that layers of several stages share; they may read them, but not change them.

    State: the values before the first step, until it is over.
    """

    def __init__(self, layers: LayerSequence, parts: Sequence[range]) -> None:
        uses: dict[Tensor, dict[int, tuple[str, nn.Module, str]]] = {}
        for stage, numbers in enumerate(parts):
            for layer in layers.layers[numbers.start : numbers.stop]:
                for prefix, module in layer.module.named_modules():
                    for name, buffer in module.named_buffers(recurse=False):
                        path = layer.full_name(prefix, name)
                        uses.setdefault(buffer, {}).setdefault(stage, (path, module, name))
        self.shared = [next(iter(found.values())) for found in uses.values() if len(found) > 1]
        self.before: list[Tensor] = []

    def record(self) -> None:
        """Copy the shared buffers before the first step."""
        self.before = [_buffer(module, name).clone() for _, module, name in self.shared]

    def check(self) -> None:
        """Raise ModelError after the first step if a layer has changed one of them."""
        pairs = zip(self.shared, self.before, strict=True)
        changed = [
            path for (path, module, name), old in pairs if not _is_same(_buffer(module, name), old)
        ]
        if changed:
            raise ModelError(
                f"the buffer {changed[0]!r} was changed by a forward, but layers of other stages "
                "share it, so the order of changes is not that of a plain loop: give each layer "
                "its own, or put these layers into one stage with balance="
            )
        self.shared, self.before = [], []


def _buffer(module: nn.Module, name: str) -> Tensor:
    buffer: Tensor = getattr(module, name)
    return buffer.detach()


def _is_same(buffer: Tensor, old: Tensor) -> bool:
    """Return whether a buffer holds the same values; NaN is equal to NaN."""
    if buffer.is_meta or buffer.shape != old.shape:
        return buffer.shape == old.shape
    return bool(((buffer == old) | ((buffer != buffer) & (old != old))).all())
