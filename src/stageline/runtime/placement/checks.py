"""Check what a pipeline is given, and find which stages exchange values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from torch import nn

from stageline.arguments import check_size
from stageline.errors import ModelError, ScheduleError
from stageline.model.layers import INPUT, LayerSequence, Value
from stageline.schedules.action import COMPUTE, Action, Kind
from stageline.schedules.build import build_schedule
from stageline.schedules.check import check
from stageline.schedules.edges import Edge
from stageline.schedules.program.stream import find_period
from stageline.schedules.schedule import Schedule

# activations: keep them, or run forward again; "selective" keeps the results of costly operators
RECOMPUTE = ("never", "always", "except_last", "selective")
BACKENDS = ("threads", "serial", "processes")


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ModelError(f"{name} is {value!r}, but takes {' or '.join(map(repr, choices))}")


def checked_schedule(
    schedule: str | Schedule, num_ranks: int | None, num_microbatches: int | None
) -> Schedule:
    """Return a schedule for these numbers of ranks and micro-batches."""
    num_ranks = _checked_size("num_ranks", num_ranks)
    num_microbatches = _checked_size("num_microbatches", num_microbatches)
    if isinstance(schedule, str):
        return build_schedule(schedule, num_ranks=num_ranks, num_microbatches=num_microbatches)
    check(schedule)
    sizes = (schedule.num_ranks, schedule.num_microbatches)
    if sizes != (num_ranks, num_microbatches):
        raise ScheduleError(
            f"the schedule is for {sizes[0]} ranks and {sizes[1]} micro-batches, but the pipeline "
            f"for {num_ranks} and {num_microbatches}: use the same"
        )
    _check_ascending(schedule)
    return schedule


def _checked_size(name: str, size: int | None) -> int:
    if size is None:
        raise ScheduleError(
            f"{name} is missing, but a pipeline needs num_ranks and num_microbatches: give both, "
            "or a plan= that has them"
        )
    check_size(name, size)
    return size


def _check_ascending(schedule: Schedule) -> None:
    """The sum of gradients depends on its order in the last bits, so there is one order for all."""
    for row in schedule.actions:
        latest: dict[tuple[int, bool], Action] = {}
        for action in row:
            if action.kind in COMPUTE and action.kind is not Kind.F:
                sort = (action.stage, action.kind is Kind.W)  # weights that I cannot leave to W too
                before = latest.setdefault(sort, action)
                if before.microbatch > action.microbatch:
                    raise ScheduleError(
                        f"{before} comes before {action}, but gradients are added in ascending "
                        "order of micro-batches in every schedule: swap them"
                    )
                latest[sort] = action


def is_asynchronous(schedule: Schedule) -> bool:
    """Return whether weights change while micro-batches that used them are on their way."""
    if not schedule.is_stream:
        return False
    return any(beat.lag or beat.version < 0 for row in find_period(schedule).rows for beat in row)


def check_optimizers(
    schedule: Schedule,
    optimizer_fn: object,
    scheduler_fn: object,
    max_norm: object,
    backend: str,
) -> None:
    """Raise if options do not go together with the pipeline's own optimizers, or need them."""
    examples = "lambda params: SGD(params, lr=0.1)", "lambda optimizer: StepLR(optimizer, 100)"
    functions = ("optimizer_fn", optimizer_fn), ("scheduler_fn", scheduler_fn)
    for (name, function), example in zip(functions, examples, strict=True):
        if function is not None and not callable(function):
            raise ModelError(
                f"{name} is {type(function).__name__}(…), but has to be a function that makes one "
                f"for each stage: {name}={example}"
            )
    for name, value in (("scheduler_fn", scheduler_fn), ("max_norm", max_norm)):
        if value is not None and optimizer_fn is None:
            raise ModelError(f"{name} was given without optimizer_fn, which it is for: give both")
    if schedule.is_stream and optimizer_fn is None:
        raise ModelError(
            f"{schedule.name!r} steps the optimizer on its own, but has none: give it one with "
            "optimizer_fn=lambda params: SGD(params, lr=0.1)"
        )
    if max_norm is not None and is_asynchronous(schedule):
        raise ModelError(
            f"max_norm was given, but with {schedule.name!r} there is no moment at which the norm "
            "of all gradients is known: omit it, or use a synchronous schedule"
        )
    if schedule.replicas and backend != "processes":
        raise ModelError(
            f"replicas is {list(schedule.replicas)}, but a stage on several ranks needs a process "
            f"for each: start the script with stageline run --num-processes {schedule.num_ranks}"
        )


def check_untied(schedule: Schedule, layers: LayerSequence, parts: Sequence[range]) -> None:
    """Versions of a weight are those of one stage."""
    seen: dict[nn.Parameter, tuple[int, str]] = {}
    for stage, numbers in enumerate(parts):
        for layer in layers.layers[numbers.start : numbers.stop]:
            for name, weight in layer.module.named_parameters():
                first, its_name = seen.setdefault(weight, (stage, layer.full_name(name)))
                if first != stage and weight.requires_grad:
                    raise ModelError(
                        f"{its_name!r} of stage {first} and {layer.full_name(name)!r} of stage "
                        f"{stage} are the same weight, but with {schedule.name!r} each stage steps "
                        "its own weights at its own time: put these layers into one stage with "
                        "balance=, or use a synchronous schedule"
                    )


def recompute_modes(recompute: str | Sequence[str], num_stages: int) -> tuple[str, ...]:
    modes = (recompute,) * num_stages if isinstance(recompute, str) else _tuple(recompute)
    if len(modes) != num_stages or not set(modes) <= set(RECOMPUTE):
        raise ModelError(
            f"recompute is {recompute!r}, but {num_stages} stages take one of "
            f"{', '.join(map(repr, RECOMPUTE))}, or one for each stage"
        )
    return modes


def _tuple(values: object) -> tuple[Any, ...]:
    return tuple(values) if isinstance(values, Iterable) else (values,)


def edges_of(layers: LayerSequence, cuts: tuple[range, ...]) -> tuple[list[Edge], list[set[Value]]]:
    """Return which stage sends to which, and for each stage the values that others read.

    A value goes straight from its writer to each reader. Its gradient goes from each reader to the
    reader before it, and from the first one to the writer: so there are edges between these too.
    """
    home = {number: stage for stage, numbers in enumerate(cuts) for number in numbers}
    readers: dict[Value, dict[int, None]] = {}  # in the order of the stages
    for number, values in enumerate(layers.sources):
        for value in values:
            if value.writer == INPUT or home[value.writer] != home[number]:
                readers.setdefault(value, {})[home[number]] = None
    edges: dict[Edge, None] = {}
    sent: list[set[Value]] = [set() for _ in cuts]
    for value, stages in readers.items():
        edges |= dict.fromkeys(pairwise(stages))
        if value.writer != INPUT:
            edges |= dict.fromkeys((home[value.writer], stage) for stage in stages)
            sent[home[value.writer]].add(value)
    return list(edges), sent
