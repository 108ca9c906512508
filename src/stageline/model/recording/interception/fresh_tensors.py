"""Tell tensors that a forward makes from those that were there before, which are constants.

Python keeps young objects in a list of their own, from which a collection moves them on. So a new
tensor is in that list, or was when a collection began. To list all objects would take 0.1 s.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping
from typing import Any, Self

from torch import Tensor

YOUNG = 0  # the generation of new objects


class FreshTensors:
    """State: the tensors that were new when a collection began within the block."""

    def __init__(self) -> None:
        self.seen: dict[int, weakref.ref[Tensor]] = {}

    def __enter__(self) -> Self:
        gc.collect(YOUNG)
        gc.callbacks.append(self._begins)
        return self

    def __exit__(self, *_: object) -> None:
        gc.callbacks.remove(self._begins)

    def _begins(self, phase: str, _: Mapping[str, Any]) -> None:
        if phase == "start":
            young = gc.get_objects(generation=YOUNG)
            tensors = [item for item in young if issubclass(type(item), Tensor)]
            self.seen |= {id(tensor): weakref.ref(tensor) for tensor in tensors}

    def __contains__(self, tensor: Tensor) -> bool:
        found = self.seen.get(id(tensor))
        if found is not None and found() is tensor:
            return True
        return any(item is tensor for item in gc.get_objects(generation=YOUNG))
