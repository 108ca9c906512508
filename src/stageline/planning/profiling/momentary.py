"""Bytes that a layer needs only while it runs: gradients on their way, and what its operators
write and throw away.

    F ─► kept ··········· B: gradient of the output ─► of weights, added to those there ─► of inputs
    └ more, for a moment  └ more, for a moment
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from stageline.planning.profiling.solo import Solo
from stageline.torch_private import TorchDispatchMode, pytree


class Live(TorchDispatchMode):
    """State: the bytes of tensors that were made inside of it and are still there, and the most."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self.there: set[int] = set()  # storages, by their address

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        given = {_address(tensor) for tensor in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            if _address(tensor) not in given | self.there:
                self._add(tensor)
        return result

    def _add(self, tensor: Tensor) -> None:
        storage, address = tensor.untyped_storage(), _address(tensor)
        size = storage.nbytes()
        self.there.add(address)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._remove, address, size)

    def _remove(self, address: int, size: int) -> None:
        self.there.remove(address)
        self.now -= size


def momentary_bytes(solo: Solo, number: int) -> int:
    """Beside what the layer keeps, in its forward or its backward, whichever needs more.

    Of a second run: the first one makes gradients that stay.
    """
    _run(solo, number)
    found = _run(solo, number)
    solo.forget_gradients(number)
    return found


def _run(solo: Solo, number: int) -> int:
    live = Live()
    with live:
        run = solo.forward(number, in_halves=False)
        kept, in_forward = live.now, live.most - live.now
        live.most = kept
        solo.backward(run, solo.ones(run))
    return max(in_forward, live.most - kept)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _address(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata  # noqa: SLF001  what it is known by
    return address
