"""The numbers of a run that reports show, as pairs of a name and a text."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

from stageline.report.summary import in_groups, number, percent
from stageline.runs.run import Run
from stageline.units import format_bytes

MOST_LISTED = 16  # numbers
Pair = tuple[str, str]


def key_figures(run: Run) -> Iterator[Pair]:
    """Yield what everybody asks first."""
    made, last = run.configuration, run.metrics[-1] if run.metrics else None
    yield "step", f"{run.step} of {made.steps}" if made.steps else str(run.step)
    if last is None:
        return
    yield "loss", number(last.loss) if last.loss is not None else "not finite"
    if last.tokens_per_second is not None:
        yield "tokens a second", number(last.tokens_per_second)
    elif last.samples_per_second is not None:
        yield "samples a second", number(last.samples_per_second)
    if last.step_seconds is not None:
        yield "time of a step", milliseconds(1e3 * last.step_seconds)
    if last.bubble is not None:
        yield "idle", percent(last.bubble)
    if last.peak_memory:
        yield "peak memory", format_bytes(max(last.peak_memory))


def configuration(run: Run) -> Iterator[Pair]:
    """Yield how the run was configured."""
    made, last = run.configuration, run.metrics[-1] if run.metrics else None
    if made.plan is not None:
        yield "plan", made.plan.description
    yield "schedule", made.schedule
    yield "ranks", _count(made.num_ranks)
    yield "replicas", _count(made.num_replicas) if made.num_replicas > 1 else ""
    yield "micro-batches", _count(made.num_microbatches)
    if last is not None and last.batch_size is not None:
        yield "samples of a step", number(last.batch_size)
    yield "stages on ranks", numbers(made.placement)
    yield "layers of stages", numbers(made.balance)
    yield "recomputation", in_groups(made.recompute)
    yield "backend", made.backend
    yield "optimizer", made.optimizer
    yield "scheduler", made.scheduler
    yield "clipped to norm", number(made.max_norm) if made.max_norm is not None else ""
    yield "parameters", number(made.num_parameters) if made.num_parameters else ""
    yield "reports every", _steps(made.report_every)
    yield "checkpoints every", _steps(made.save_every)
    yield from sorted(made.options.items())


def environment(run: Run) -> Iterator[Pair]:
    """Yield where the run ran."""
    machine = run.environment
    yield "stageline", machine.stageline
    yield "torch", machine.torch
    yield "python", machine.python
    yield "system", machine.system
    yield "cores", _count(machine.num_cores)
    yield "threads of an operation", _count(machine.num_threads)
    yield "processes", _count(machine.num_processes)
    yield "devices", _grouped(machine.devices)
    yield "started", moment(run.started)
    yield "resumed from step", _count(run.resumed_from)
    yield "last written", moment(run.updated)


def moment(seconds: float | None) -> str:
    """Return a time since 1970 as a date; nothing if it cannot be one.

    >>> moment(1_700_000_000.0), moment(1e30)
    ('2023-11-14 22:13:20 UTC', '')
    """
    if not seconds:
        return ""
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):
        return ""


def milliseconds(time: float) -> str:
    """Return a time in ms or s.

    >>> milliseconds(12.34), milliseconds(12_340)
    ('12.34 ms', '12.34 s')
    """
    return f"{number(time / 1e3)} s" if time >= 9999.5 else f"{number(time)} ms"


def status(run: Run) -> str:
    """Return how the run ended, in words."""
    if run.status == "unfinished":
        return "unfinished: it is running, or was killed"
    if run.status == "unknown":
        return "its end was not recorded"
    return run.status


def _count(count: int) -> str:
    return f"{count:,}" if count else ""


def _steps(count: int) -> str:
    return f"{count:,} steps" if count else ""


def numbers(values: tuple[int, ...]) -> str:
    """Return numbers, or of many what they have in common.

    >>> numbers((3, 3)), numbers((3,) * 32), numbers(tuple(range(32)))
    ('3, 3', '32 × 3', '0 to 31')
    """
    if len(values) <= MOST_LISTED:
        return ", ".join(map(str, values))
    if len(set(values)) == 1:
        return f"{len(values)} × {values[0]}"
    if values == tuple(range(len(values))):
        return f"0 to {values[-1]}"
    return f"{', '.join(map(str, values[:MOST_LISTED]))}, … ({len(values)})"


def _grouped(names: tuple[str, ...]) -> str:
    """Return names, each once, with how often it occurs."""
    return ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names[:1000]))
