"""Add the gradient of a large embedding row by row, with the bits of a dense gradient.

Autograd makes a gradient of a whole table for each micro-batch, nearly all zeros, and adds it:

    tokens 7 2 7 ─► zeros(60000, 128), rows 2 and 7 summed ─► .grad += it       30 MB, 2 to 25 ms
                 ─► rows 2 and 7 summed                    ─► .grad[2, 7] += them       0.02 ms

Here a lookup's backward returns the summed rows as a sparse tensor, whose indices are sorted and
unique, and autograd does the rest. It adds such tensors to each other and to dense ones as it would
add the dense ones, number by number, so tables that are used more than once are no special case.

What the rows without tokens lack is `+ 0.0`, which changes nothing but `-0.0`. So the first
gradient of a table is dense, and rows are added only to a `.grad` that nobody has changed since.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  as everybody calls it
from torch.utils.weak import WeakTensorKeyDictionary

from stageline.model.function_interceptor import FunctionInterceptor
from stageline.runtime.exactness.inner_gradients import is_transformed
from stageline.torch_private import (
    dispatch_modes,
    has_gradient_hooks,
    is_inside_transform,
    version_of,
    will_execute,
)

# Bytes of a table. Forward and backward of 256 tokens take 100 µs here, whatever the table; with
# autograd's dense gradient 170 µs at 4 MiB, 470 at 8, and 13 ms at 32, where glibc returns pages.
LARGE = 2**22
EXACT_TYPES = (torch.float32, torch.float64)  # whose sums were compared, on CPU
HOOK = "stageline: after the sum"  # a key in the metadata of a table's node


class LargeTables(FunctionInterceptor):
    """Replaces lookups in large tables while a layer runs forward; `layers` are those with some.

    State: the gradients that no `-0.0` is in, with their version at that time.
    """

    def __init__(self, modules: Mapping[int, nn.Module]) -> None:
        super().__init__()
        self.layers = frozenset(number for number, module in modules.items() if _has_table(module))
        self.added: MutableMapping[Tensor, int] = WeakTensorKeyDictionary()

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Look up rows if that is what the function does, in a way that it can be done here."""
        if func is not F.embedding or torch.compiler.is_compiling():
            return func(*args, **kwargs)
        return self._look_up(*args, **kwargs)

    def _look_up(
        self,
        indices: Tensor,
        weight: Tensor,
        padding_idx: int | None,
        norm_type: float,
        **rest: Any,
    ) -> Tensor:
        # the rest changes weights (max_norm), scales gradients, or wants them to be sparse
        is_ordinary = all(value is None or value is False for value in rest.values())
        if not (is_ordinary and _is_large_table(weight)) or is_transformed((indices, weight)):
            return F.embedding(indices, weight, padding_idx, norm_type=norm_type, **rest)
        result: Tensor = _Lookup.apply(weight, indices, padding_idx, self)  # type: ignore[no-untyped-call]
        if result.grad_fn is not None:
            _observe_sum(_sum_node(result.grad_fn), self)
        return result

    def may_add_rows(self, weight: Tensor) -> bool:
        """Return whether rows can be added to a table's gradient as if all were."""
        gradient = weight.grad
        return (
            gradient is not None
            and self.added.get(gradient) == version_of(gradient)
            and gradient.is_contiguous()
            and not gradient.requires_grad
            and not has_gradient_hooks(weight)  # they would see a sparse gradient
        )


def _has_table(module: nn.Module) -> bool:
    return any(isinstance(p, nn.Embedding) and _is_large(p.weight) for p in module.modules())


class _Lookup(torch.autograd.Function):
    """An embedding whose backward returns rows where this gives the same bits.

    It saves what `F.embedding` saves, so that a checkpoint within a layer finds the same.
    """

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, indices: Tensor, padding_idx: int | None, tables: LargeTables
    ) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.padding_idx, ctx.tables = padding_idx, tables
        return F.embedding(indices, weight, padding_idx)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        node = _sum_node(ctx)
        weight: Tensor = node.variable
        indices = ctx.saved_tensors[0]
        padding = -1 if ctx.padding_idx is None else ctx.padding_idx % len(weight)
        if HOOK in node.metadata:
            node.metadata[HOOK].has_lookup = True
        if _adds_to_gradient(node, gradient, indices) and ctx.tables.may_add_rows(weight):
            return _rows(gradient, indices, padding, weight.shape), None, None, None
        return _dense(gradient, indices, padding, len(weight)), None, None, None


class _AfterSum:
    """Notes that a table's gradient was added, after autograd did it. State: whether it will."""

    def __init__(self, weight: Tensor, tables: LargeTables) -> None:
        self.weight, self.tables, self.has_lookup = weight, tables, False

    def __call__(self, *_: Any) -> None:
        if self.has_lookup and self.weight.grad is not None:
            self.tables.added[self.weight.grad] = version_of(self.weight.grad)
        self.has_lookup = False


def _observe_sum(node: Any, tables: LargeTables) -> None:
    """Observe the node that adds to a table's `.grad`; micro-batches in flight share it."""
    if HOOK not in node.metadata:
        node.metadata[HOOK] = after = _AfterSum(node.variable, tables)
        node.register_hook(after)


def _sum_node(lookup: Any) -> Any:
    return lookup.next_functions[0][0]


def _rows(gradient: Tensor, indices: Tensor, padding: int, shape: torch.Size) -> Tensor:
    """Return a sparse gradient: tokens of a row are added in their order, as in a dense one."""
    rows, places = torch.unique(indices, return_inverse=True)
    values = _dense(gradient, places, -1, len(rows))
    if padding >= 0:
        values[rows == padding] = 0.0
    return torch.sparse_coo_tensor(
        rows[None].long(), values, shape, check_invariants=False, is_coalesced=True
    )


def _dense(gradient: Tensor, indices: Tensor, padding: int, num_rows: int) -> Tensor:
    """Return what autograd computes itself; differentiable."""
    return torch.ops.aten.embedding_dense_backward(gradient, indices, num_rows, padding, False)  # type: ignore[no-any-return]


def _adds_to_gradient(node: Any, gradient: Tensor, indices: Tensor) -> bool:
    """Return whether the backward that runs adds to `.grad`, and rows are less than the table.

    Otherwise it returns the gradient to somebody, or differentiates it.
    """
    if torch.is_grad_enabled() or is_inside_transform() or dispatch_modes():
        return False  # a mode may ask every tensor for its storage, which sparse ones do not have
    # with half as many tokens as rows both take about as long
    if type(gradient) is not Tensor or not 0 < 2 * indices.numel() <= len(node.variable):
        return False
    try:
        return will_execute(node) is True
    except RuntimeError:  # torch.autograd.grad of the table itself
        return False


def _is_large_table(weight: Tensor) -> bool:
    """Return whether a lookup in this table is replaced."""
    return (
        type(weight) is nn.Parameter
        and weight.requires_grad
        and torch.is_grad_enabled()
        and weight.device.type == "cpu"  # other kernels have another order of sums
        and weight.dtype in EXACT_TYPES
        and _is_large(weight)
    )


def _is_large(weight: Tensor) -> bool:
    return weight.numel() * weight.element_size() >= LARGE
