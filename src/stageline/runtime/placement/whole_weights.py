"""Initialize weights that are in parts on several processes with the numbers of whole ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from stageline.model.named_places import named_places, replaced_parameters


@contextmanager
def whole_weights(module: nn.Module, mark: Callable[[Tensor], None]) -> Iterator[None]:
    """Let a module initialize whole weights, and copy to this process's parts what it has drawn.

    Otherwise a part would be drawn like a tensor of its own: all processes with the same numbers.
    `mark` is called for the whole weights, which have no values at first.
    """
    parts = {name: t for name, t in named_places(module) if _is_in_parts(t)}
    wholes = {part: _empty_whole(part) for part in parts.values()}
    for whole in wholes.values():
        mark(whole)
    with replaced_parameters(module, {name: wholes[part] for name, part in parts.items()}):
        yield
    for part, whole in wholes.items():
        _copy_own_part(part, whole)


def _is_in_parts(tensor: Any) -> bool:
    """Return whether a parameter is divided in a way in which a whole one can be divided too."""
    is_in_parts = isinstance(tensor, nn.Parameter) and hasattr(tensor, "device_mesh")
    if not is_in_parts:
        return False
    from torch.distributed.tensor import Replicate, Shard  # noqa: PLC0415  its import takes 0.2 s

    return all(type(placement) in (Replicate, Shard) for placement in tensor.placements)


def _empty_whole(part: Any) -> nn.Parameter:
    empty = torch.empty(part.shape, dtype=part.dtype, device=part.to_local().device)
    return nn.Parameter(empty, requires_grad=part.requires_grad)


@torch.no_grad()
def _copy_own_part(part: Any, whole: Tensor) -> None:
    from torch.distributed.tensor import distribute_tensor  # noqa: PLC0415  as above

    # without a source rank nothing is sent: every process has all of it
    own = distribute_tensor(whole, part.device_mesh, part.placements, src_data_rank=None)
    part.to_local().copy_(own.to_local())
