"""All names of each tensor of a model: tied weights have several."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from torch import Tensor, nn

from stageline.checkpoint.group import has_rank
from stageline.checkpoint.pipeline_state import model_tensors
from stageline.pipeline import Pipeline


class SharedTensor(NamedTuple):
    """A parameter or buffer of the model with its names, in the order of the layers."""

    tensor: Tensor
    names: tuple[str, ...]
    layer: str  # the first layer that has it
    is_here: bool  # a layer of this process has it


def shared_tensors(pipe: Pipeline) -> list[SharedTensor]:
    """Return each tensor of the model once, including those of other processes."""
    found: dict[Hashable, SharedTensor] = {}
    for each in model_tensors(pipe):
        is_here = has_rank(pipe, each.rank)
        new = SharedTensor(each.tensor, (each.own_name,), each.layer, is_here)
        key = _memory(each.tensor)
        known = found.setdefault(key, new)
        if known is not new:
            names = tuple(dict.fromkeys((*known.names, *new.names)))
            found[key] = known._replace(names=names, is_here=known.is_here or is_here)
    return list(found.values())


def user_models(pipe: Pipeline) -> tuple[nn.Module, ...]:
    """Return the modules that the user gave to the pipeline."""
    return tuple(dict.fromkeys((pipe.model, *pipe.layers.containers)))


def _memory(tensor: Tensor) -> Hashable:
    """Return a key that two tensors have in common if they are the same elements in memory."""
    if tensor.is_meta or not tensor.numel() or hasattr(tensor, "to_local"):
        return id(tensor)
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()
