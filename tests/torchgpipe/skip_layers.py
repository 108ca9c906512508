"""Layers with skips that several tests use."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from torch import Tensor, nn

from stageline.torchgpipe.skip import pop, skippable, stash

Commands = Generator[Any, Any, Tensor]


class _Stash(nn.Module):
    def __init__(self, name: str = "skip", value: Any = ...) -> None:
        super().__init__()
        self.linear, self.name, self.value = nn.Linear(3, 3), name, value

    def forward(self, x: Tensor) -> Commands:
        yield stash(self.name, x if self.value is ... else self.value)
        return self.linear(x)  # type: ignore[no-any-return]


class _Pop(nn.Module):
    def __init__(self, name: str = "skip") -> None:
        super().__init__()
        self.linear, self.name = nn.Linear(3, 3), name

    def forward(self, x: Tensor) -> Commands:
        found = yield pop(self.name)
        return self.linear(x) if found is None else self.linear(x) + found  # type: ignore[no-any-return]


Stash = skippable(stash=["skip"])(_Stash)
Pop = skippable(pop=["skip"])(_Pop)
