"""Refuse what a recording could not repeat: calls, and arguments that hide tensors or chance."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from stageline.errors import ModelError
from stageline.model import trees
from stageline.model.recording.interception.functions import is_in_place
from stageline.model.recording.tape import Arguments
from stageline.torch_private import storage_identity

OWN_MODULE = "put this into a module of its own and name it in opaque="
NOT_FOLLOWED = (
    "in which tensors cannot be followed: switch it off (a cache by use_cache=False), or use "
    "tensors, and tuples, lists, dicts and dataclasses of them"
)
SETS_DATA = Tensor.data.__set__  # type: ignore[attr-defined]  # a descriptor's method
RUNS_BACKWARD = (Tensor.backward, torch.autograd.backward)


class NotOpaqueError(ModelError):
    """A module is called with what cannot be followed into it, so its own code is recorded."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(reason)
        self.name = name


def constant(leaf: Any, what: str, is_constant: Callable[[Tensor], bool]) -> Any:
    """Return an argument that is no tensor as it stands on a tape; `what` begins a refusal."""
    if leaf is None or isinstance(leaf, trees.PLAIN):
        return leaf
    if is_array([leaf]):
        return leaf.copy()  # made of constants: a tensor that becomes an array is refused
    if isinstance(leaf, torch.Generator):
        raise ModelError(
            f"{what} a generator, but ranks draw in another order than a plain loop: use torch's "
            "default generator, whose numbers depend on the layer and the micro-batch alone"
        )
    for held in _held(leaf):
        if isinstance(held, nn.Module) and any(True for _ in held.parameters()):
            raise ModelError(
                f"{what} a {type(held).__name__}, whose weights would be used outside of its own "
                f"layer: call it where its result is needed, or {OWN_MODULE}"
            )
        if isinstance(held, Tensor) and not is_constant(held):
            raise ModelError(
                f"{what} a function that holds a tensor of shape {tuple(held.shape)}, which would "
                f"stay as it was in the recording: give the tensor as an argument, or {OWN_MODULE}"
            )
    if trees.hides_tensors(leaf):
        raise ModelError(f"{what} a {type(leaf).__name__}, {NOT_FOLLOWED}")
    return leaf


def is_array(items: Sequence[Any]) -> bool:
    """Return whether the first item is an array or a number of numpy."""
    return any(type(item).__module__ == "numpy" and hasattr(item, "ndim") for item in items[:1])


def _held(leaf: Any) -> Iterator[Any]:
    """Yield a module, or the tensors and modules that a function brings along."""
    if isinstance(leaf, nn.Module):
        yield leaf
    elif isinstance(leaf, partial):
        for each in (leaf.func, *leaf.args, *leaf.keywords.values()):
            yield from _held_item(each)
    elif isinstance(leaf, MethodType):
        yield from _held_item(leaf.__self__)
    elif isinstance(leaf, FunctionType):
        for cell in leaf.__closure__ or ():
            yield from _held_item(cell.cell_contents)
        for default in (*(leaf.__defaults__ or ()), *(leaf.__kwdefaults__ or {}).values()):
            yield from _held_item(default)


def _held_item(item: Any) -> Iterator[Any]:
    for leaf in trees.flatten(item)[0]:
        if isinstance(leaf, Tensor):
            yield leaf
        else:
            yield from _held(leaf)


def refuse_call(func: Callable[..., Any], call: Arguments, weights: set[int], line: str) -> None:
    """Raise if a function changes weights, or starts a backward; `weights` are their storages."""
    if func in RUNS_BACKWARD:
        raise ModelError(
            f"{line}: the forward calls backward() outside of its layers, where gradients of other "
            f"layers are not there yet: {OWN_MODULE}"
        )
    if func == SETS_DATA:
        raise ModelError(
            f"{line}: the forward sets .data of a tensor, behind which nothing can be followed: "
            "change it in place under torch.no_grad(), or do so after the optimizer's step"
        )
    targets = [call[1].get("out")]
    if is_in_place(func) and func is not Tensor.requires_grad_:
        targets += call[0][:1]
    for target in trees.tensors(targets):
        if _storage(target) in weights:
            raise ModelError(
                f"{line}: the forward changes a weight of shape {tuple(target.shape)} in place, "
                "while other micro-batches are under way: do so after the optimizer's step"
            )


def _storage(tensor: Tensor) -> int | None:
    try:
        return storage_identity(tensor)
    except NotImplementedError:  # sparse, or a wrapper of torch.func
        return None


def storages(tensors: Any) -> set[int]:
    """Return the identities of the memory of tensors that have any of their own."""
    return {found for found in map(_storage, tensors) if found is not None}
