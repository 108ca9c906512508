"""Where stashed tensors wait until they are popped.

In a plain `nn.Sequential` they wait in a scope of the calling thread. In a pipeline every layer has
a scope of its own, which begins with what the layer pops and ends with what it stashed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from torch import Tensor

from stageline.torchgpipe.skip.namespace import Namespace


class SkipKey(NamedTuple):
    """What identifies a skip; None is the namespace of those that were not isolated."""

    namespace: Namespace | None
    name: str


Stashed = dict[SkipKey, Tensor | None]

_SCOPE: ContextVar[Stashed | None] = ContextVar("stageline_stashed_skips", default=None)


def stashed_skips() -> Stashed:
    """Return what waits in the scope of the caller."""
    found = _SCOPE.get()
    if found is None:
        found = {}
        _SCOPE.set(found)
    return found


@contextmanager
def skip_scope(stashed: Stashed) -> Iterator[Stashed]:
    """Within it, layers pop from these and stash among them."""
    token = _SCOPE.set(stashed)
    try:
        yield stashed
    finally:
        _SCOPE.reset(token)
