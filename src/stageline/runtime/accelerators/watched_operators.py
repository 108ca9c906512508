"""See every operator of torch in a thread: which memory it reads and writes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor

from stageline.runtime.accelerators.simulation import Simulation
from stageline.torch_private import TorchDispatchMode, operator_schema

# Arguments that an operator writes though its schema does not say so.
UNDECLARED_WRITES = {
    "aten::native_batch_norm": ("running_mean", "running_var"),
    "aten::cudnn_batch_norm": ("running_mean", "running_var"),
    "aten::miopen_batch_norm": ("running_mean", "running_var"),
}


class WatchedOperators(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """A mode that queues each operator of a thread on its simulated stream."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as well
        self.simulation = simulation

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return True, so that `CallerContext` does not carry it to other threads."""
        return True

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        accesses = _accesses(func)
        if accesses is None or self.simulation.thread.is_paused:
            return func(*args, **kwargs)
        reads, writes = accesses.of(args, kwargs)
        self.simulation.queue(accesses.name, reads, writes)
        result = func(*args, **kwargs)
        self.simulation.allocated(accesses.name, _tensors(result))
        return result


class Accesses(NamedTuple):
    """What an operator does with its arguments, by their names and in their order."""

    name: str
    arguments: tuple[str, ...]
    written: frozenset[str]
    is_view: bool

    def of(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return the tensors that a call reads, and those that it writes."""
        reads: list[Tensor] = []
        writes: list[Tensor] = []
        if not self.is_view:
            for name, value in (*zip(self.arguments, args, strict=False), *kwargs.items()):
                (writes if name in self.written else reads).extend(_tensors(value))
        return reads, writes


@cache
def _accesses(operator: Any) -> Accesses | None:
    """Return what an operator does; None for one that only calls others."""
    schema = operator_schema(operator)
    if schema is None:
        return None
    written = {a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write}
    returned = [r.alias_info for r in schema.returns if r.alias_info]
    is_view = bool(returned) and not any(info.is_write for info in returned)
    names = tuple(argument.name for argument in schema.arguments)
    undeclared = UNDECLARED_WRITES.get(schema.name, ())
    return Accesses(schema.name, names, frozenset({*written, *undeclared}), is_view)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
