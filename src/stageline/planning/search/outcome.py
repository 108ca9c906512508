"""What a search found: its time, why others lost, and if nothing fits what comes nearest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from stageline.planning.plan import Option, Plan, costs_as_numbers
from stageline.planning.search.layouts import Task
from stageline.planning.search.ways import Expected, Way, built
from stageline.report.memory import peak_memory
from stageline.schedules.schedule import Schedule
from stageline.units import format_bytes


@dataclass(frozen=True)
class Found:
    """A way that fits, simulated."""

    way: Way
    schedule: Schedule
    expected: Expected

    @property
    def seconds(self) -> float:
        return self.expected.seconds

    @property
    def peaks(self) -> tuple[float, ...]:
        """Bytes, by rank."""
        return _peaks(self.way, self.schedule)

    def plan(self, task: Task, others: Iterable[Option] = ()) -> Plan:
        return Plan(
            layers=task.profile.names,
            balance=self.way.cut.balance,
            recompute=self.way.cut.recompute,
            actions=tuple(" ".join(map(str, row)) for row in self.schedule.actions),
            costs=costs_as_numbers(self.way.costs, self.schedule.num_stages),
            peak_memory=self.peaks,
            batch_size=task.batch_size,
            chosen=self.option(),
            others=tuple(others),
        )

    def option(self, verdict: str = "") -> Option:
        return option_of(self.way, self.schedule, self.seconds, self.expected.bubble, verdict)


def option_of(
    way: Way, schedule: Schedule, seconds: float, bubble: float, verdict: str = ""
) -> Option:
    return Option(
        schedule=way.name,
        num_ranks=way.layout.num_ranks,
        replicas=way.layout.replicas,
        num_microbatches=way.layout.num_microbatches,
        samples=way.layout.samples,
        recompute=sum(way.cut.recompute),
        seconds=seconds,
        bubble=bubble,
        peak_memory=max(_peaks(way, schedule)),
        verdict=verdict,
        chunks=way.chunks,
        side_by_side=way.layout.grid.side_by_side,
        offload=way.cut.offload,
        stage_replicas=way.layout.grid.stages,
    )


def _peaks(way: Way, schedule: Schedule) -> tuple[float, ...]:
    return peak_memory(schedule.actions, schedule.placement, way.costs, schedule.replicas)


def others(found: Sequence[Found]) -> Iterator[Option]:
    """The next best, one of each schedule, and by how much they are slower."""
    best = found[0]
    seen = {best.way.name}
    for each in found[1:]:
        if each.way.name not in seen:
            seen.add(each.way.name)
            slower = each.seconds / best.seconds - 1 if best.seconds else 0.0
            yield each.option(f"{100 * slower:.1f} % slower: {_why(each, best)}")


def _why(loser: Found, best: Found) -> str:
    if sum(loser.way.cut.recompute) > sum(best.way.cut.recompute):
        return "needs more recomputation to fit"
    if loser.way.cut.is_tight and not best.way.cut.is_tight:
        return "its stages are cut to fit, not to be even"
    if loser.expected.bubble > best.expected.bubble:
        return "a larger bubble"
    if loser.seconds > loser.expected.work_ends:
        return "waits for gradients of other replicas"
    if loser.way.layout != best.way.layout:
        return "slower micro-batches"
    return "its forwards and backwards take longer"


def why_nothing_fits(task: Task, nearest: tuple[float, Way] | None, advice: str) -> str:
    """What comes nearest, and what would make it fit; `advice` is what else would."""
    devices, memory = task.cluster.num_devices, task.cluster.device(0).memory_bytes
    if nearest is None:
        return (
            f"no schedule can cut {len(task.profile.names)} layers for {devices} devices and "
            f"batches of {task.batch_size}: use fewer devices, larger batches or other schedules"
        )
    way = nearest[1]
    (ranks, _, _, stages), _, count = way.layout
    schedule = built(way.name, ranks, count, way.chunks, stages=stages)
    option = option_of(way, schedule, 0.0, 0.0)
    static = max(way.costs.static(way.family.placement, stages))
    return (
        f"nothing fits in {format_bytes(memory)}; nearest comes {option.words}, whose fullest rank "
        f"needs {format_bytes(option.peak_memory)} (parameters, gradients and optimizer state take "
        f"{format_bytes(static)}): {advice or 'use '}devices with that much, or more of them"
    )


def stages_in_words(chosen: Sequence[bool]) -> str:
    """
    >>> stages_in_words([True, True, True, False, True])
    'stages 0-2, 4'
    """
    numbers = [stage for stage, is_chosen in enumerate(chosen) if is_chosen]
    runs = groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    ends = [[number for _, number in run] for _, run in runs]
    words = [f"{run[0]}-{run[-1]}" if run[1:] else f"{run[0]}" for run in ends]
    return f"stage{'s' if numbers[1:] else ''} {', '.join(words)}"
