"""Cut a mini-batch into micro-batches, as evenly as possible, and join their outputs again.

Tensors are cut and joined along dim 0, without losing a sample. How outputs are joined:

- Containers have to be the same in all micro-batches, with the same keys, fields and lengths.
- A tensor has its samples along dim 0: one for each sample of its micro-batch, several (the tokens
  of all samples in a row), or as many as the data say (those that a mask chose).
- A tensor that is the same in all micro-batches, and has no such length, does not depend on samples
  and is kept once. One whose samples seem to be along another dimension is refused; where dim 0 is
  by chance as long as the micro-batch, this cannot be seen.
- What is no tensor is kept if it is equal in all micro-batches, None included.

All else is refused, by an error that names the place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from stageline.errors import BatchError
from stageline.runtime import trees
from stageline.runtime.trees import Spec

OPEN = (
    "put its tensors in a tuple, list, dict, named tuple or dataclass, or register its class with "
    "torch.utils._pytree.register_pytree_node"
)
ALIKE = (
    "return the same containers and types for every micro-batch, one row for each sample in "
    "tensors, and leave out what differs otherwise"
)


def sizes(num_samples: int, num_microbatches: int) -> list[int]:
    """They differ by one at most, larger ones first; a small batch makes fewer micro-batches.

    >>> sizes(10, 4), sizes(2, 4)
    ([3, 3, 2, 2], [1, 1])
    """
    each, more = divmod(num_samples, num_microbatches)
    return [each + (i < more) for i in range(min(num_samples, num_microbatches))]


def num_samples(*batches: Any) -> int:
    """The common length of all tensors along dim 0."""
    lengths = {tensor.shape[0] for tensor in trees.tensors(batches) if tensor.ndim}
    if len(lengths) != 1:
        found = ", ".join(map(str, sorted(lengths))) or "none"
        raise BatchError(
            f"lengths along dim 0 are {found}, but inputs and target are cut there together and "
            "need one length: pass what is no batch as a number, or from the model"
        )
    if not (length := lengths.pop()):
        raise BatchError("the batch has no samples, but a step needs one at least")
    return length


def cut(batch: Any, pieces: list[int]) -> list[Any]:
    """The pieces of a tree; what is no tensor, or has no dimension, is in every piece."""
    leaves, spec = trees.flatten(batch)
    columns = [
        torch.split(leaf, pieces)
        if isinstance(leaf, Tensor) and leaf.ndim
        else (leaf,) * len(pieces)
        for leaf in leaves
    ]
    for number, leaf in enumerate(leaves):
        if trees.hides_tensors(leaf):
            raise BatchError(
                f"the batch has a {type(leaf).__name__}{_at(trees.paths(spec)[number])}, but "
                f"tensors or arrays in it would not be cut into micro-batches: {OPEN}"
            )
    rows = zip(*columns, strict=True) if columns else [()] * len(pieces)
    return [trees.unflatten(row, spec) for row in rows]


def join(pieces: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Return one tree for the outputs of micro-batches of these sizes, by the rules above.

    >>> join([{"y": torch.zeros(2), "n": 7}, {"y": torch.ones(1), "n": 7}], [2, 1])
    {'y': tensor([0., 0., 1.]), 'n': 7}
    """
    flat = [trees.flatten(piece) for piece in pieces]
    spec = flat[0][1]
    for number, (_, other) in enumerate(flat):
        if other != spec:
            _refuse_containers(spec, other, "", number)
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    places = trees.paths(spec)
    joined = [_joined(c, sizes, place) for c, place in zip(columns, places, strict=True)]
    return trees.unflatten(joined, spec)


def splitter(
    column: Sequence[Tensor], sizes: Sequence[int]
) -> Callable[[Tensor], list[Tensor | None]]:
    """Return how the gradient of a joined output is cut again, into those of micro-batches."""
    if _is_kept_once(column, sizes):
        return lambda gradient: [gradient, *([None] * (len(sizes) - 1))]
    rows = [len(tensor) for tensor in column]
    return lambda gradient: list(torch.split(gradient, rows))


def pair(item: Any) -> tuple[Any, Any]:
    """What a loader gives, taken apart."""
    if isinstance(item, tuple | list) and len(item) == 2:
        return item[0], item[1]
    raise BatchError(
        f"the loader gave a {type(item).__name__}, but a batch is a pair (inputs, target): several "
        "inputs go in a dict or a tuple of their own"
    )


def _joined(column: Sequence[Any], sizes: Sequence[int], place: str) -> Any:
    """Return one leaf for those of all micro-batches."""
    if all(isinstance(leaf, Tensor) for leaf in column):
        return _joined_tensors(column, sizes, place)
    first = column[0]
    for number, leaf in enumerate(column):
        if trees.hides_tensors(leaf):
            _refuse(f"a {type(leaf).__name__} with tensors or arrays in it", place, OPEN)
        if not _is_same(first, leaf):
            _refuse(f"{_shown(first)} in micro-batch 0 and {_shown(leaf)} in {number}", place)
    return first


def _joined_tensors(column: Sequence[Tensor], sizes: Sequence[int], place: str) -> Tensor:
    first = column[0]
    if any(not tensor.ndim for tensor in column):
        raise BatchError(
            f"the output has a tensor without dimensions{_at(place)}, but outputs of "
            "micro-batches are joined along dim 0: return one value for each sample"
        )
    if len(column) == 1:
        return first
    if dim := _other_dim(column, sizes):
        _refuse(
            f"a tensor of shape {tuple(first.shape)}, whose samples seem to be along dim {dim}",
            place,
            "return it with the samples first",
        )
    for number, tensor in enumerate(column):
        if (tensor.dtype, tensor.shape[1:]) != (first.dtype, first.shape[1:]):
            _refuse(f"{_shown(first)} in micro-batch 0 and {_shown(tensor)} in {number}", place)
    if _is_kept_once(column, sizes):
        return first
    try:
        return torch.cat(list(column))
    except (RuntimeError, NotImplementedError, TypeError) as error:
        _refuse(f"a {type(first).__name__} of layout {first.layout} ({error})", place)


def _is_kept_once(column: Sequence[Tensor], sizes: Sequence[int]) -> bool:
    """Whether the tensors of all micro-batches are one that does not depend on their samples."""
    return len(column) > 1 and not _per_sample(column, sizes) and _are_equal(column)


def _per_sample(column: Sequence[Tensor], sizes: Sequence[int]) -> int:
    """How many rows there are for each sample; 0 if that is not a number, or not always the same.

    A tensor without rows has one for each of no samples.
    """
    rows = [len(tensor) for tensor in column]
    each = rows[0] // sizes[0]
    is_fixed = all(n == each * size for n, size in zip(rows, sizes, strict=True))
    return (each or 1) if is_fixed else 0


def _other_dim(column: Sequence[Tensor], sizes: Sequence[int]) -> int:
    """Return the dimension that is as long as each micro-batch, if dim 0 is not; else 0."""
    each = _per_sample(column, sizes)
    num_dims = min(tensor.ndim for tensor in column)
    # the tokens of all samples in a row are rows of a matrix, and dim 1 may have any length
    if each == 1 or len({len(tensor) for tensor in column}) > 1 or (each and num_dims < 3):
        return 0
    lengths = [[tensor.shape[dim] for tensor in column] for dim in range(1, num_dims)]
    return next((dim for dim, found in enumerate(lengths, 1) if found == list(sizes)), 0)


def _are_equal(column: Sequence[Tensor]) -> bool:
    first = column[0]
    return all(t.dtype == first.dtype and torch.equal(t, first) for t in column[1:])


def _is_same(a: Any, b: Any) -> bool:
    """Whether what is no tensor is equal; what is not a number is equal to itself."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, float) and math.isnan(a) and math.isnan(b):
        return True
    return isinstance(a, trees.PLAIN) and bool(a == b)


def _refuse_containers(spec: Spec, other: Spec, place: str, number: int) -> NoReturn:
    """Name the first place where two trees differ."""
    parts = zip(spec.children, other.children, strict=False)
    differing = [i for i, (child, another) in enumerate(parts) if child != another]
    is_alike = (spec.type, spec.context) == (other.type, other.context)
    if not is_alike or len(spec.children) != len(other.children) or not differing:
        _refuse(f"{_container(spec)} in micro-batch 0 and {_container(other)} in {number}", place)
    first = differing[0]
    place += trees.names(spec)[first]
    _refuse_containers(spec.children[first], other.children[first], place, number)


def _container(spec: Spec) -> str:
    if spec.type is None:
        return "a tensor or another leaf"
    names = ", ".join(name.lstrip(".") for name in trees.names(spec))
    return f"a {spec.type.__name__} of {len(spec.children)} ({names})"


def _shown(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"a tensor of shape {tuple(leaf.shape)} and {leaf.dtype}"
    return f"{leaf!r:.60}" if leaf is None or isinstance(leaf, trees.PLAIN) else f"a {type(leaf)}"


def _at(place: str) -> str:
    return f" at {place}" if place else ""


def _refuse(found: str, place: str, remedy: str = ALIKE) -> NoReturn:
    raise BatchError(
        f"the output has {found}{_at(place)}, but outputs of micro-batches are joined along dim 0: "
        f"{remedy}"
    )
