"""Tensors of a forward, with their names on the tape or their places in a module."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from stageline.model.recording.tape import InnerOutput


class TrackedTensor(NamedTuple):
    """A tensor with its name on the tape. It is kept, so that no other gets its identity."""

    tensor: Tensor
    name: str
    made_by: int  # the number of the operation; -1 for a tensor of the batch


class TakenOut(NamedTuple):
    """A tensor inside an opaque module, which a hook may take out of it."""

    tensor: Tensor
    stands_for: Tensor | None  # an argument or a tensor of the result; None for an inner one
    place: InnerOutput | None
    made_by: int
