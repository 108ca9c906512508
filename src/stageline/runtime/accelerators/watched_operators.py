"""See every operator of torch in a thread: which memory it reads and writes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor

from stageline.model.recording.interception.operator_watch import (
    SHAPES_FROM_DATA,
    UNTAGGED,
    needs_data,
)
from stageline.runtime.accelerators.host_waits import refuse_wait
from stageline.runtime.accelerators.simulation import Simulation
from stageline.torch_private import TorchDispatchMode, operator_schema
from stageline.torch_private_training import skipped_by_compiler

# Arguments that an operator writes though its schema does not say so.
UNDECLARED_WRITES = {
    "aten::native_batch_norm": ("running_mean", "running_var"),
    "aten::cudnn_batch_norm": ("running_mean", "running_var"),
    "aten::miopen_batch_norm": ("running_mean", "running_var"),
}


FROM_PYTHON = "aten::lift_fresh"  # makes a tensor of numbers in Python, in host memory


class QueuesOperators:
    """What the mode below does. Torch hides a mode's own method from its compiler, at a price."""

    simulation: Simulation

    @skipped_by_compiler
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
        if accesses.name == FROM_PYTHON:
            result = func(*args, **kwargs)
            self.simulation.made_on_host(_tensors(result))
            return result
        if accesses.is_view:
            return func(*args, **kwargs)
        reads, writes = accesses.of(args, kwargs)
        simulation = self.simulation
        if accesses.may_wait and needs_data(func, args) and simulation.is_in_step(reads):
            refuse_wait(accesses.name)
        queued = simulation.run(accesses.name, reads, writes)
        result = func(*args, **kwargs)
        simulation.allocated(_tensors(result), queued, simulation.device)
        return result


class WatchedOperators(QueuesOperators, TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that queues each operator of a thread on its simulated stream."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.simulation = simulation

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return True, so that `CallerContext` does not carry it to other threads."""
        return True


class Accesses(NamedTuple):
    """What an operator does with its arguments, by their names and in their order."""

    name: str
    arguments: tuple[str, ...]
    written: frozenset[str]
    is_view: bool
    may_wait: bool  # the host, for data that decide on a shape or a number

    def of(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return the tensors that a call reads, and those that it writes."""
        reads: list[Tensor] = []
        writes: list[Tensor] = []
        for name, value in (*zip(self.arguments, args, strict=False), *kwargs.items()):
            if isinstance(value, Tensor | tuple | list):
                (writes if name in self.written else reads).extend(_tensors(value))
        return reads, writes


@cache
def _accesses(operator: Any) -> Accesses | None:
    """Return what an operator reads and writes; None for one that only calls others."""
    schema = operator_schema(operator)
    if schema is None:
        return None
    written = {a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write}
    returned = [r.alias_info for r in schema.returns if r.alias_info]
    is_view = bool(returned) and not any(info.is_write for info in returned)
    names = tuple(argument.name for argument in schema.arguments)
    undeclared = UNDECLARED_WRITES.get(schema.name, ())
    may_wait = not SHAPES_FROM_DATA.isdisjoint(operator.tags) or schema.name in UNTAGGED
    return Accesses(schema.name, names, frozenset({*written, *undeclared}), is_view, may_wait)


def _tensors(value: Any) -> Sequence[Tensor]:
    if isinstance(value, Tensor):
        return (value,)
    if isinstance(value, tuple | list):
        return [tensor for item in value for tensor in _tensors(item)]
    return ()
