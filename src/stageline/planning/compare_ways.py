"""Compare all options that a search considered, and say why each of them lost.

`sl.plan` simulates only what its bounds leave, and reports the best of each schedule. Here the
others are estimated from few micro-batches as well, so that a picture can show all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from stageline.planning.partition.stage_costs import StageCut
from stageline.planning.plan import why_nothing_fits
from stageline.planning.plan_result import PlanOption
from stageline.planning.search.candidate import PlanCandidate
from stageline.planning.search.search import SAME_MEMORY, PlanSearch, ReportProgress
from stageline.planning.search.search_result import EvaluatedCandidate, option_of, verdict_on
from stageline.planning.search.training_layouts import PlanRequest
from stageline.units import format_bytes

MAX_ESTIMATED_ACTIONS = 1_000_000  # simulated for all estimates together, in about 2 seconds
MAX_ESTIMATED_STREAM_ACTIONS = 20_000  # the same if asynchronous: each takes longer


class Precision(Enum):
    """How the step time of an option was obtained."""

    SIMULATED = "simulated"
    ESTIMATED = "estimated"  # from few micro-batches; its memory is that of all
    BOUND = "bound"  # too long to simulate: it takes at least this time, and memory is not known


@dataclass(frozen=True)
class Way:
    """One way to train, with the cut of its layers; the option's verdict says why it lost."""

    option: PlanOption
    cut: StageCut
    precision: Precision
    fits: bool | None  # None: its memory is not known


@dataclass(frozen=True)
class WaysToTrain:
    """All options for training: the best first, the others by time."""

    ways: tuple[Way, ...]
    has_best: bool  # False if nothing fits
    message: str  # why nothing fits


def compare_ways(
    request: PlanRequest, schedules: Sequence[str], progress: ReportProgress
) -> WaysToTrain:
    """Search for a plan, and return all options that were considered.

    `progress` is called as that of `sl.plan`; what it raises ends the search.
    """
    search = PlanSearch(request, schedules, progress)
    found = search.run()
    best = found[0] if found else None
    # the faster of two orders of one schedule, by its rule and searched for, comes last and stays
    exact = {_identity(each.candidate): each for each in reversed(found)}
    others = (each for each in search.candidates if _identity(each) not in exact)
    losers = [
        *(
            _way(each, Precision.SIMULATED, 0.0, best)
            for each in exact.values()
            if each is not best
        ),
        *_estimated_ways(search, others, best),
    ]
    ways = sorted(losers, key=lambda way: way.option.seconds)
    if best is None:
        return WaysToTrain(tuple(ways), False, why_nothing_fits(request, schedules, search))
    winner = Way(best.to_option(), best.candidate.cut, Precision.SIMULATED, fits=True)
    return WaysToTrain((winner, *ways), True, "")


def _identity(candidate: PlanCandidate) -> tuple[object, ...]:
    return candidate.layout, candidate.schedule_name, candidate.shape, candidate.cut


def _estimated_ways(
    search: PlanSearch, candidates: Iterable[PlanCandidate], best: EvaluatedCandidate | None
) -> Iterator[Way]:
    """Yield the candidates as options; those with the lowest bounds are timed while time lasts.

    What cannot be built for its number of micro-batches is omitted.
    """
    distinct = {_identity(each): each for each in candidates}
    left = {False: MAX_ESTIMATED_ACTIONS, True: MAX_ESTIMATED_STREAM_ACTIONS}
    for count, each in enumerate(sorted(distinct.values(), key=PlanCandidate.lower_bound), start=1):
        search.progress(search.num_tried, f"estimating {count} of {len(distinct)} others")
        num_actions = 3 * len(each.shape.placement) * each.num_short_run_microbatches
        if num_actions > left[each.shape.is_asynchronous]:
            yield _bound_way(each, best)
            continue
        left[each.shape.is_asynchronous] -= num_actions
        # the order of a schedule that has to be searched for is close to that of its rule
        name = each.schedule_name
        short = search.short_schedule(each, SAME_MEMORY.get(name, name))
        if short is not None:
            prediction = search.predictor.predict_from_short_run(each, short)
            evaluated = EvaluatedCandidate(each, short, prediction)
            yield _way(evaluated, Precision.ESTIMATED, max(search.excess(each, short)), best)


def _way(
    evaluated: EvaluatedCandidate,
    precision: Precision,
    excess: float,
    best: EvaluatedCandidate | None,
) -> Way:
    option = evaluated.to_option()
    if excess > 0:
        verdict = (
            f"does not fit: a rank needs {format_bytes(excess)} more than its device has, "
            f"the fullest {format_bytes(option.peak_memory)} in all"
        )
    else:
        assert best is not None  # or this one would have been found
        verdict = verdict_on(evaluated, best)
    option = replace(option, verdict=verdict)
    return Way(option, evaluated.candidate.cut, precision, fits=excess <= 0)


def _bound_way(candidate: PlanCandidate, best: EvaluatedCandidate | None) -> Way:
    seconds, verdict = candidate.lower_bound(), "too long to simulate beside the others"
    if best is not None and seconds > best.seconds:
        verdict = f"at least {100 * (seconds / best.seconds - 1):.1f} % slower: {verdict}"
    option = option_of(candidate, seconds, 0.0, 0.0, verdict)
    return Way(option, candidate.cut, Precision.BOUND, fits=None)
