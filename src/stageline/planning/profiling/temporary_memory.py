"""Measure the memory that a layer needs only while it runs.

These are gradients on their way to other layers, and what operators write and then discard.

    F ─► saved ··········· B: gradient of the output ─► of weights, accumulated ─► of inputs
    └ temporary            └ temporary
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from stageline.planning.profiling.layer_runner import LayerRunner
from stageline.torch_private import TorchDispatchMode, pytree, storage_identity


class LiveTensorBytes(TorchDispatchMode):
    """Counts the bytes of tensors that are created inside of it and still alive.

    State: the current number, the peak, and the storages that are counted.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.current = self.peak = 0
        self.counted: set[int] = set()  # addresses of storages

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        given = {storage_identity(tensor) for tensor in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            if storage_identity(tensor) not in given | self.counted:
                self._add(tensor)
        return result

    def _add(self, tensor: Tensor) -> None:
        storage, address = tensor.untyped_storage(), storage_identity(tensor)
        num_bytes = storage.nbytes()
        self.counted.add(address)
        self.current += num_bytes
        self.peak = max(self.peak, self.current)
        weakref.finalize(storage, self._remove, address, num_bytes)

    def _remove(self, address: int, num_bytes: int) -> None:
        self.counted.remove(address)
        self.current -= num_bytes


def temporary_bytes(runner: LayerRunner, number: int) -> int:
    """Return the temporary bytes of a layer's forward or backward, whichever needs more.

    The second run counts: the first one allocates the gradients of parameters, which stay.
    """
    _run(runner, number)
    num_bytes = _run(runner, number)
    runner.zero_grad(number)
    return num_bytes


def _run(runner: LayerRunner, number: int) -> int:
    live = LiveTensorBytes()
    with live:
        run = runner.forward(number, in_halves=False)
        saved, in_forward = live.current, live.peak - live.current
        live.peak = saved
        runner.backward(run, runner.output_gradients(run))
    return max(in_forward, live.peak - saved)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
