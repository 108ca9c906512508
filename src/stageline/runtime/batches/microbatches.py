"""Cut a mini-batch into micro-batches, as evenly as possible, and join their outputs again.

Tensors are cut and joined along dim 0, without losing a sample. Rules for joining outputs:

- Containers have to be the same in all micro-batches, with the same keys, fields and lengths.
- A tensor has its samples along dim 0: one row for each sample of its micro-batch, several (the
  tokens of all samples), or as many as the data say (those that a mask selected).
- A tensor that is the same in all micro-batches, and has no such length, does not depend on samples
  and is kept once. One whose samples seem to be along another dimension is refused; this cannot be
  detected where dim 0 happens to be as long as the micro-batch.
- What is no tensor is kept if it is equal in all micro-batches, None included.
- A number in a tensor without dimensions, such as a model's own loss, is the mean of those of the
  micro-batches, weighted as their losses are; without weights it is refused.

Everything else is refused by an error that names its path in the output.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from stageline.errors import BatchError
from stageline.model import trees
from stageline.model.trees import Spec
from stageline.model.uncut import Uncut

USE_CONTAINERS = (
    "put its tensors in a tuple, list, dict, named tuple or dataclass, or register its class with "
    "torch.utils._pytree.register_pytree_node"
)
RETURN_ALIKE = (
    "return the same containers and types for every micro-batch, one row for each sample in "
    "tensors, and leave out what differs otherwise"
)


def sizes(num_samples: int, num_microbatches: int) -> list[int]:
    """Return the micro-batch sizes, which differ by at most one, larger ones first.

    A batch of fewer samples than micro-batches gives fewer of them.


    >>> sizes(10, 4), sizes(2, 4)
    ([3, 3, 2, 2], [1, 1])
    """
    each, more = divmod(num_samples, num_microbatches)
    return [each + (i < more) for i in range(min(num_samples, num_microbatches))]


def num_samples(*batches: Any) -> int:
    """Return the common length of all tensors along dim 0."""
    lengths = {tensor.shape[0] for tensor in trees.tensors(batches) if tensor.ndim}
    if len(lengths) != 1:
        found = ", ".join(map(str, sorted(lengths))) or "none"
        raise BatchError(
            f"lengths along dim 0 are {found}, but inputs and target are cut there together and "
            "need one length: mark tensors that all samples share, such as a mask, with "
            "sl.Uncut(tensor)"
        )
    if not (length := lengths.pop()):
        raise BatchError("the batch has no samples, but a step needs at least one")
    return length


def cut(batch: Any, pieces: list[int]) -> list[Any]:
    """Cut a tree into pieces of these sizes; what is marked, or no tensor, is in every piece."""
    leaves, spec = trees.flatten(batch)
    columns = [_column(leaf, pieces) for leaf in leaves]
    for number, leaf in enumerate(leaves):
        if not isinstance(leaf, Uncut) and trees.hides_tensors(leaf):
            is_array = hasattr(leaf, "__array__")
            remedy = "convert it with torch.as_tensor" if is_array else USE_CONTAINERS
            raise BatchError(
                f"the batch has a {type(leaf).__name__}{_at(trees.paths(spec)[number])}, but "
                f"tensors or arrays in it would not be cut into micro-batches: {remedy}"
            )
    if spec.type is None:  # a single tensor, as most targets are
        return [*columns[0]]
    rows = zip(*columns, strict=True) if columns else [()] * len(pieces)
    return [trees.unflatten(row, spec) for row in rows]


def _column(leaf: Any, pieces: list[int]) -> Sequence[Any]:
    """Return the leaf's part in each piece."""
    if isinstance(leaf, Tensor) and leaf.ndim:
        return torch.split(leaf, pieces)
    return [leaf.value if isinstance(leaf, Uncut) else leaf] * len(pieces)


def first_microbatch(batch: Any, num_microbatches: int) -> Any:
    """Return the first micro-batch of a mini-batch."""
    pieces = sizes(num_samples(batch), num_microbatches)
    return cut(batch, pieces)[0]


def join(
    pieces: Sequence[Any], sizes: Sequence[int], weights: Sequence[float] | None = None
) -> Any:
    """Join the outputs of micro-batches of these sizes by the rules above.

    >>> join([{"y": torch.zeros(2), "n": 7}, {"y": torch.ones(1), "n": 7}], [2, 1])
    {'y': tensor([0., 0., 1.]), 'n': 7}
    """
    flat = [trees.flatten(piece) for piece in pieces]
    spec = flat[0][1]
    for number, (_, other) in enumerate(flat):
        if other != spec:
            _raise_for_containers(spec, other, "", number)
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    all_paths = trees.paths(spec)
    pairs = zip(columns, all_paths, strict=True)
    joined = [_joined(column, sizes, path, weights) for column, path in pairs]
    return trees.unflatten(joined, spec)


def _are_numbers(column: Sequence[Tensor]) -> bool:
    return all(not tensor.ndim and tensor.is_floating_point() for tensor in column)


def splitter(
    column: Sequence[Tensor], sizes: Sequence[int], weights: Sequence[float] | None = None
) -> Callable[[Tensor], list[Tensor | None]]:
    """Return a function that cuts the gradient of a joined output into those of micro-batches."""
    if weights is not None and _are_numbers(column):
        return lambda gradient: [gradient * weight for weight in weights]
    if _is_kept_once(column, sizes):
        return lambda gradient: [gradient, *([None] * (len(sizes) - 1))]
    rows = [len(tensor) for tensor in column]
    return lambda gradient: list(torch.split(gradient, rows))


def pair(item: Any, *, has_own_loss: bool) -> tuple[Any, Any]:
    """Return the inputs and the target of what a loader yields.

    If the model computes its own loss, all of the item is inputs, as in `pipe.step(item)`, but for
    a pair that already has them apart: (mapping, ignored) or (inputs, None).
    """
    is_pair = isinstance(item, tuple | list) and len(item) == 2
    if has_own_loss and not (is_pair and (isinstance(item[0], Mapping) or item[1] is None)):
        # a DataLoader makes lists of a dataset's tuples
        return tuple(item) if isinstance(item, list) else item, None
    if is_pair:
        return item[0], item[1]
    raise BatchError(
        f"the loader gave a {type(item).__name__}, but a batch is a pair (inputs, target): put "
        "several inputs in a dict or a tuple, or omit loss_fn if the model computes its own loss"
    )


def _joined(
    column: Sequence[Any], sizes: Sequence[int], path: str, weights: Sequence[float] | None
) -> Any:
    """Join the leaves of all micro-batches at one path."""
    if all(isinstance(leaf, Tensor) for leaf in column):
        if weights is not None and _are_numbers(column):
            return sum(leaf * weight for leaf, weight in zip(column, weights, strict=True))
        return _joined_tensors(column, sizes, path)
    first = column[0]
    for number, leaf in enumerate(column):
        if trees.hides_tensors(leaf):
            _raise(f"a {type(leaf).__name__} with tensors or arrays in it", path, USE_CONTAINERS)
        if not _is_same(first, leaf):
            _raise(f"{_shown(first)} in micro-batch 0 and {_shown(leaf)} in {number}", path)
    return first


def _joined_tensors(column: Sequence[Tensor], sizes: Sequence[int], path: str) -> Tensor:
    first = column[0]
    if any(not tensor.ndim for tensor in column):
        raise BatchError(
            f"the output has a tensor without dimensions{_at(path)}, but outputs of "
            "micro-batches are joined along dim 0: return one value for each sample"
        )
    if len(column) == 1:
        return first
    if dim := _other_dim(column, sizes):
        _raise(
            f"a tensor of shape {tuple(first.shape)}, whose samples seem to be along dim {dim}",
            path,
            "return it with the samples first",
        )
    for number, tensor in enumerate(column):
        if (tensor.dtype, tensor.shape[1:]) != (first.dtype, first.shape[1:]):
            _raise(f"{_shown(first)} in micro-batch 0 and {_shown(tensor)} in {number}", path)
    if _is_kept_once(column, sizes):
        return first
    try:
        return torch.cat(list(column))
    except (RuntimeError, NotImplementedError, TypeError) as error:
        _raise(f"a {type(first).__name__} of layout {first.layout} ({error})", path)


def _is_kept_once(column: Sequence[Tensor], sizes: Sequence[int]) -> bool:
    """Return whether all micro-batches have one tensor that does not depend on their samples."""
    return len(column) > 1 and not _per_sample(column, sizes) and _are_equal(column)


def _per_sample(column: Sequence[Tensor], sizes: Sequence[int]) -> int:
    """Return the number of rows for each sample, or 0 if it varies or is not a whole number.

    A tensor without rows counts as one row for each of no samples.
    """
    rows = [len(tensor) for tensor in column]
    each = rows[0] // sizes[0]
    is_fixed = all(n == each * size for n, size in zip(rows, sizes, strict=True))
    return (each or 1) if is_fixed else 0


def _other_dim(column: Sequence[Tensor], sizes: Sequence[int]) -> int:
    """Return another dimension that is as long as each micro-batch if dim 0 is not, or 0."""
    each = _per_sample(column, sizes)
    num_dims = min(tensor.ndim for tensor in column)
    # the tokens of all samples are rows of a matrix, and dim 1 may have any length
    if each == 1 or len({len(tensor) for tensor in column}) > 1 or (each and num_dims < 3):
        return 0
    lengths = [[tensor.shape[dim] for tensor in column] for dim in range(1, num_dims)]
    return next((dim for dim, found in enumerate(lengths, 1) if found == list(sizes)), 0)


def _are_equal(column: Sequence[Tensor]) -> bool:
    first = column[0]
    return all(t.dtype == first.dtype and torch.equal(t, first) for t in column[1:])


def _is_same(a: Any, b: Any) -> bool:
    """Return whether two leaves that are no tensors are equal; NaN is equal to NaN."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, float) and math.isnan(a) and math.isnan(b):
        return True
    return isinstance(a, trees.PLAIN) and bool(a == b)


def _raise_for_containers(spec: Spec, other: Spec, path: str, number: int) -> NoReturn:
    """Raise BatchError with the first path at which two trees differ."""
    parts = zip(spec.children, other.children, strict=False)
    differing = [i for i, (child, another) in enumerate(parts) if child != another]
    is_alike = (spec.type, spec.context) == (other.type, other.context)
    if not is_alike or len(spec.children) != len(other.children) or not differing:
        _raise(f"{_container(spec)} in micro-batch 0 and {_container(other)} in {number}", path)
    first = differing[0]
    path += trees.child_names(spec)[first]
    _raise_for_containers(spec.children[first], other.children[first], path, number)


def _container(spec: Spec) -> str:
    if spec.type is None:
        return "a tensor or another leaf"
    names = ", ".join(name.lstrip(".") for name in trees.child_names(spec))
    return f"a {spec.type.__name__} of {len(spec.children)} ({names})"


def _shown(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"a tensor of shape {tuple(leaf.shape)} and {leaf.dtype}"
    return f"{leaf!r:.60}" if leaf is None or isinstance(leaf, trees.PLAIN) else f"a {type(leaf)}"


def _at(path: str) -> str:
    return f" at {path}" if path else ""


def _raise(found: str, path: str, remedy: str = RETURN_ALIKE) -> NoReturn:
    raise BatchError(
        f"the output has {found}{_at(path)}, but outputs of micro-batches are joined along dim 0: "
        f"{remedy}"
    )
