"""Turn the results of a search into a plan, and say why other candidates lost or do not fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from stageline.planning.plan_result import Plan, PlanOption, costs_by_stage
from stageline.planning.search.candidate import PlanCandidate
from stageline.planning.search.candidate_schedules import build_sized
from stageline.planning.search.memory_check import peak_bytes
from stageline.planning.search.predict_time import StepPrediction
from stageline.planning.search.training_layouts import PlanRequest
from stageline.schedules.schedule import Schedule
from stageline.units import format_bytes


@dataclass(frozen=True)
class EvaluatedCandidate:
    """A candidate that fits in memory, with its schedule and predicted time."""

    candidate: PlanCandidate
    schedule: Schedule
    prediction: StepPrediction

    @property
    def seconds(self) -> float:
        """The predicted time of a step."""
        return self.prediction.seconds

    def to_plan(self, request: PlanRequest, others: Iterable[PlanOption] = ()) -> Plan:
        """Return the candidate as a plan; `others` are the alternatives to report."""
        return Plan(
            layers=request.profile.names,
            balance=self.candidate.cut.balance,
            recompute=self.candidate.cut.recompute,
            actions=tuple(" ".join(map(str, row)) for row in self.schedule.actions),
            costs=costs_by_stage(self.candidate.costs, self.schedule.num_stages),
            peak_memory=peak_bytes(self.candidate, self.schedule),
            batch_size=request.batch_size,
            chosen=self.to_option(),
            others=tuple(others),
            has_links=bool(request.cluster.levels),
            selective=self.candidate.cut.selective,
        )

    def to_option(self, verdict: str = "") -> PlanOption:
        """Return the candidate as an option of a plan, with the reason why it was not chosen."""
        peak = max(peak_bytes(self.candidate, self.schedule))
        return option_of(self.candidate, self.seconds, self.prediction.bubble, peak, verdict)


def option_of(
    candidate: PlanCandidate, seconds: float, bubble: float, peak_memory: float, verdict: str = ""
) -> PlanOption:
    """Return a candidate with these predictions as an option of a plan."""
    layout = candidate.layout
    return PlanOption(
        schedule=candidate.schedule_name,
        num_ranks=layout.num_ranks,
        replicas=layout.replicas,
        num_microbatches=layout.num_microbatches,
        samples=layout.microbatch_size,
        recompute=sum(candidate.cut.recompute),
        selective=sum(candidate.cut.selective),
        seconds=seconds,
        bubble=bubble,
        peak_memory=peak_memory,
        verdict=verdict,
        chunks=candidate.chunks,
        side_by_side=layout.grid.side_by_side,
        offload=candidate.cut.offload,
        stage_replicas=layout.grid.stage_replicas,
    )


def alternatives(found: Sequence[EvaluatedCandidate]) -> Iterator[PlanOption]:
    """Yield the best of every other schedule, and why and by how much it is slower."""
    best = found[0]
    names = {best.candidate.schedule_name}
    for each in found[1:]:
        if each.candidate.schedule_name not in names:
            names.add(each.candidate.schedule_name)
            yield each.to_option(verdict_on(each, best))


def verdict_on(loser: EvaluatedCandidate, best: EvaluatedCandidate) -> str:
    """Return by how much a candidate that fits is slower than the best, and why."""
    slower = max(0.0, loser.seconds / best.seconds - 1) if best.seconds else 0.0
    return f"{100 * slower:.1f} % slower: {_reason(loser, best)}"


def _reason(loser: EvaluatedCandidate, best: EvaluatedCandidate) -> str:
    """Return the main reason why a candidate is slower than the best."""
    if _recomputed(loser) > _recomputed(best):
        return "needs more recomputation to fit"
    if loser.candidate.cut.is_cut_for_memory and not best.candidate.cut.is_cut_for_memory:
        return "its stages are uneven in order to fit"
    if loser.prediction.bubble > best.prediction.bubble:
        return "a larger bubble"
    if loser.seconds > loser.prediction.work_ends:
        return "waits for gradients of other replicas"
    if loser.candidate.layout != best.candidate.layout:
        return "slower micro-batches"
    return "its forwards and backwards take longer"


def _recomputed(evaluated: EvaluatedCandidate) -> tuple[int, int]:
    """Return how many stages are recomputed, and of them wholly."""
    cut = evaluated.candidate.cut
    return sum(cut.recompute), sum(cut.recompute) - sum(cut.selective)


def nothing_fits_message(request: PlanRequest, closest: PlanCandidate | None, advice: str) -> str:
    """Return an error message that names the closest candidate, and what would make it fit."""
    devices, memory = request.cluster.num_devices, request.cluster.device(0).memory_bytes
    if closest is None:
        return (
            f"no schedule can cut {len(request.profile.names)} layers for {devices} devices and "
            f"batches of {request.batch_size}: use fewer devices, larger batches or other schedules"
        )
    layout, stage_replicas = closest.layout, closest.layout.grid.stage_replicas
    schedule = build_sized(
        closest.schedule_name,
        layout.num_ranks,
        layout.num_microbatches,
        closest.chunks,
        stage_replicas=stage_replicas,
    )
    option = option_of(closest, 0.0, 0.0, max(peak_bytes(closest, schedule)))
    static = max(closest.costs.static(closest.shape.placement, stage_replicas))
    return (
        f"nothing fits in {format_bytes(memory)}; the closest is {option.description}, whose "
        f"fullest rank needs {format_bytes(option.peak_memory)} (parameters, gradients and "
        f"optimizer state take {format_bytes(static)}): {advice or 'use '}devices with that much "
        "memory, or more devices"
    )


def format_stages(chosen: Sequence[bool]) -> str:
    """Return the numbers of the chosen stages as text.

    >>> format_stages([True, True, True, False, True])
    'stages 0-2, 4'
    """
    numbers = [stage for stage, is_chosen in enumerate(chosen) if is_chosen]
    groups = groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    runs = [[number for _, number in group] for _, group in groups]
    parts = [f"{run[0]}-{run[-1]}" if run[1:] else f"{run[0]}" for run in runs]
    return f"stage{'s' if numbers[1:] else ''} {', '.join(parts)}"
