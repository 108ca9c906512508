"""Watch the operators that a call runs: do they draw random numbers, or make shapes from data?

torch tags its operators, so that this holds for every function that is made of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from stageline.model import trees
from stageline.torch_private import TorchDispatchMode

SHAPES_FROM_DATA = frozenset({torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output})
UNTAGGED = frozenset({"aten::_pack_padded_sequence"})
MASKS = (torch.bool, torch.uint8)


class OperatorWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """State: what was seen within the block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as well
        self.is_random = False
        self.has_dynamic_shapes = False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.see(func, args)
        return func(*args, **(kwargs or {}))

    def see(self, func: Any, args: tuple[Any, ...]) -> None:
        """Take in what an operator does."""
        tags = getattr(func, "tags", ())
        self.is_random |= torch.Tag.nondeterministic_seeded in tags
        self.has_dynamic_shapes |= needs_data(func, args)


def needs_data(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether data decide on a shape or a number; an index by numbers has their own."""
    tags = getattr(func, "tags", ())
    if func.name() not in UNTAGGED and SHAPES_FROM_DATA.isdisjoint(tags):
        return False
    if func is not torch.ops.aten.index.Tensor:
        return True
    return any(index.dtype in MASKS for index in trees.tensors(args[1:]))
