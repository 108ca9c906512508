"""What surrounds a call: autocast as the caller set it, carried over to the ranks' threads."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import torch

DEVICE_TYPES = ("cpu", "cuda")


@dataclass(frozen=True)
class Ambient:
    """Autocast's data type by device type, where it is on."""

    autocast: tuple[tuple[str, torch.dtype], ...]

    @staticmethod
    def here() -> Ambient:
        """As it is in the calling thread."""
        return Ambient(
            tuple(
                (kind, torch.get_autocast_dtype(kind))
                for kind in DEVICE_TYPES
                if torch.is_autocast_enabled(kind)
            )
        )

    def enter(self, around: ExitStack, *, grad: bool) -> None:
        """The same in another thread or at another time, with or without recording a graph."""
        if torch.is_grad_enabled() != grad:
            around.enter_context(torch.set_grad_enabled(grad))
        for kind, dtype in self.autocast:
            # its cache of casts is one for all threads, and each that leaves clears it
            around.enter_context(torch.autocast(kind, dtype, cache_enabled=False))
        for kind in DEVICE_TYPES:
            if torch.is_autocast_enabled(kind) and kind not in dict(self.autocast):
                around.enter_context(torch.autocast(kind, enabled=False))
