"""Run the operations of a tape on values, and let go of each value after its last use.

Operations are prepared once: which of their arguments are values, which are constants.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stageline.errors import ModelError
from stageline.model import trees
from stageline.model.recording.stand_in import inner_outputs
from stageline.model.recording.tape import Context, Operation

Values = dict[str, Any]
State = Callable[[str], Any]
Modules = Mapping[str, nn.Module]


class Step(NamedTuple):
    """An operation, its arguments as functions of the values, and the values of no further use."""

    operation: Operation
    arguments: Callable[[Values, State], Any]
    released: tuple[str, ...]


class OperationGroup(NamedTuple):
    """Steps that follow each other in the same modes."""

    context: Context | None
    steps: tuple[Step, ...]


def prepared(operations: Sequence[Operation], kept: Collection[str]) -> tuple[OperationGroup, ...]:
    """Return operations ready to run; afterwards the values of these names are still there."""
    pairs = zip(operations, _released(operations, kept), strict=True)
    steps = (Step(each, each.arguments.filler, names) for each, names in pairs)
    groups = groupby(steps, key=lambda step: step.operation.context)
    return tuple(OperationGroup(context, tuple(found)) for context, found in groups)


def _released(operations: Sequence[Operation], kept: Collection[str]) -> Iterator[tuple[str, ...]]:
    """Yield for each operation the names of values that no later one reads."""
    last: dict[str, int] = {}
    for place, each in enumerate(operations):
        last |= dict.fromkeys((*each.reads, *each.all_writes), place)
    for place, each in enumerate(operations):
        names = dict.fromkeys((*each.reads, *each.all_writes))
        yield tuple(name for name in names if last[name] == place and name not in kept)


def run_groups(
    groups: Sequence[OperationGroup], values: Values, state: State, modules: Modules
) -> None:
    """Run prepared operations, which add what they write to the values."""
    for context, steps in groups:
        if context is None:
            _run_steps(steps, values, state, modules)
        else:
            with ExitStack() as stack:
                _enter(context, stack)
                _run_steps(steps, values, state, modules)


def _run_steps(steps: Sequence[Step], values: Values, state: State, modules: Modules) -> None:
    for operation, arguments, released in steps:
        args, kwargs = arguments(values, state)
        target = operation.target
        if isinstance(target, str):
            module = modules[target]
            if operation.inner:
                _run_with_inner(operation, module, (args, kwargs), values)
                result = None
            else:
                result = module(*args, **kwargs)
        else:
            result = target(*args, **kwargs)
        del args, kwargs
        if operation.renamed:
            for pair in operation.renamed:
                values[pair.new] = values[pair.old]
        if isinstance(result, Tensor) and not operation.is_guard:
            values[operation.writes[0]] = result
        elif not operation.inner:
            _take_results(operation, result, values)
        result = None
        for name in released:
            del values[name]


def _run_with_inner(
    operation: Operation, module: nn.Module, arguments: Any, values: Values
) -> None:
    """Run a module, and take tensors of its submodules out of it."""
    paths = {place.path for place in operation.inner if not place.attribute}
    with inner_outputs(module, paths) as found:
        result = module(*arguments[0], **arguments[1])
    places = dict(found)
    for place in operation.inner:
        if place.attribute:
            held = trees.tensors(getattr(module.get_submodule(place.path), place.attribute, None))
            places |= dict(zip([place], held[place.leaf :], strict=False))
    if missing := [place for place in operation.inner if place not in places]:
        what = f"{missing[0].path}.{missing[0].attribute}".strip(".")
        raise ModelError(
            f"{operation.line}: {what!r} in {operation.module!r} has fewer tensors than when it "
            "was recorded: name the module around it in opaque="
        )
    _take_results(operation, result, values, [places[place] for place in operation.inner])


def _take_results(
    operation: Operation, result: Any, values: Values, inner: Sequence[Tensor] = ()
) -> None:
    if not (operation.writes or operation.constants):
        return  # it was called for what it does
    leaves, _ = trees.flatten(result)
    if operation.is_guard:
        if leaves != list(operation.constants):
            raise GuardError(operation)
        return
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)] + list(inner)
    others = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
    if len(tensors) != len(operation.writes) or others != list(operation.constants):
        raise ModelError(
            f"{operation.line}: {operation.module or operation.target} returned other things than "
            f"when it was recorded: {len(tensors)} tensors and {others!r:.60} instead of "
            f"{len(operation.writes)} and {list(operation.constants)!r:.60}; return tensors "
            "instead of numbers that change, or name the module around it in opaque="
        )
    values.update(zip(operation.writes, tensors, strict=True))


class GuardError(ModelError):
    """The model would go another way than the one that was recorded, by what a tensor holds."""

    def __init__(self, guard: Operation) -> None:
        origin = "a random number" if guard.by_chance else "what its layers compute"
        remedy = "switch this off (layerdrop=0.0, say), or " if guard.by_chance else ""
        super().__init__(
            f"{guard.line}: the model goes on by {origin}, as a number in Python, which is another "
            f"one than in the recording, where it was {list(guard.constants)!r:.60}: {remedy}keep "
            "it in a tensor (torch.where), or put this into a module of its own and name it in "
            "opaque="
        )


def _enter(context: Context, stack: ExitStack) -> None:
    if not context.grad:
        stack.enter_context(torch.no_grad())
    if context.inference:
        stack.enter_context(torch.inference_mode())
    for device, enabled, dtype in context.autocast:
        stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
