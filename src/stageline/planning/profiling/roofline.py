"""Estimate the time of operators from shapes: that of their FLOPs or of their memory traffic."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from stageline.planning.profiling.measure_rates import DeviceRates
from stageline.torch_private import TorchDispatchMode, pytree

aten = torch.ops.aten
# torch has FLOP formulas for the attention kernels of GPUs only
FLOP_FORMULAS: dict[Any, Any] = {
    aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[  # noqa: SLF001
        aten._scaled_dot_product_flash_attention  # noqa: SLF001
    ],
    aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[  # noqa: SLF001
        aten._scaled_dot_product_flash_attention_backward  # noqa: SLF001
    ],
}
GATHERS = {
    aten.embedding,
    aten.index_select,
    aten.gather,
    aten.index,
}  # read as many bytes as they write
ALLOCATIONS = {
    aten.empty,
    aten.empty_like,
    aten.new_empty,
    aten.empty_strided,
}  # read and write nothing


class RooflineTimer(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Adds up the estimated time of all operators that run inside of it.

    State: the seconds so far.
    """

    def __init__(self, rates: DeviceRates) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rates, self.seconds = rates, 0.0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.seconds += max(
            _flops(func, args, kwargs, result) / self.rates.flops,
            _num_bytes(func, args, kwargs, result) / self.rates.bandwidth,
        )
        return result


def _flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> float:
    packet = func.overloadpacket
    formula = FLOP_FORMULAS.get(packet) or flop_registry.get(packet)
    return float(formula(*args, **kwargs, out_val=result)) if formula else 0.0


def _num_bytes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    packet = func.overloadpacket
    if func.is_view or packet in ALLOCATIONS:
        return 0
    written = sum(map(_size, _tensors(result)))
    if packet in GATHERS or not written:  # without a result it only reads metadata
        return 2 * written
    return written + sum(map(_size, _tensors((args, kwargs))))


def _tensors(tree: Any) -> Iterable[Tensor]:
    return (leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor))


def _size(tensor: Tensor) -> int:
    """Return the bytes of a tensor; an expanded one has fewer than its elements would take."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
