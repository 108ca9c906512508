"""PipeDream (arXiv 1806.03377): 1F1B without a flush; weights change while batches are in flight.

rank 0 │ F0⁰ F1⁰ F2⁰ ... ... B0⁰ F3¹ B1⁰ F4² B2⁰ F5³ B3¹ ..
rank 1 │ ... F0⁰ F1⁰ ... B0⁰ F2¹ B1⁰ F3² B2¹ F4³ B3² F5⁴ ..   p = 3, a step for every micro-batch;
rank 2 │ ... ... F0⁰ B0⁰ F1¹ B1¹ F2² B2² F3³ B3³ F4⁴ B4⁴ ..   small: the version of the weights

After its warm-up a stage alternates forward and backward, and steps its optimizer as soon as all
gradients of a mini-batch are computed. A backward uses the weights that its forward used (weight
stashing): stage s of n uses w(t-n+s), s from 1. With `vertical_sync` all stages use w(t-n+1), the
weights of the first stage when the micro-batch entered it.

The paper's mini-batch is one micro-batch here. With m micro-batches, the gradients of m
micro-batches make one step, and the paper's delays apply to mini-batches, rounded up.

If a stage has r ranks (`replicas`), its rank i mod r runs micro-batch i (1F1B-RR), and each of
these ranks steps when the gradients of all of them are reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from stageline.arguments import shown
from stageline.errors import ScheduleError
from stageline.schedules.action import Action, Kind
from stageline.schedules.placement import side_by_side
from stageline.schedules.program.stream import Period, PeriodEntry, unroll
from stageline.schedules.schedule import Schedule

VersionOf = Callable[[int, int], int]  # (stage, micro-batch) -> version, as in `PeriodEntry`


def pipedream(
    num_ranks: int,
    num_microbatches: int,
    *,
    num_minibatches: int | None = None,
    vertical_sync: bool = False,
    replicas: Sequence[int] | None = None,
) -> Schedule:
    """Return the schedule, by default with enough mini-batches to fill the pipeline."""
    counts = checked_replicas(replicas, num_ranks, num_microbatches)

    def version_of(stage: int, microbatch: int) -> int:
        stage = 0 if vertical_sync else stage
        own = microbatch // counts[stage]
        return (own - num_warmup(counts, stage)) * counts[stage] // num_microbatches

    return stream_1f1b(counts, num_microbatches, version_of, num_minibatches)


def stream_1f1b(
    replicas: Sequence[int],
    num_microbatches: int,
    version_of: VersionOf,
    num_minibatches: int | None,
) -> Schedule:
    """Return 1F1B without a flush; `version_of` gives the weight version of each micro-batch."""
    rows = [
        tuple(
            _row(stage, replica, count, num_warmup(replicas, stage), num_microbatches, version_of)
        )
        for stage, count in enumerate(replicas)
        for replica in range(count)
    ]
    is_replicated = max(replicas) > 1
    counts = tuple(replicas) if is_replicated else ()
    period = Period(tuple(rows), side_by_side(replicas), num_microbatches, counts)
    # enough mini-batches for `find_period` to find the period
    enough = period.lag + max(3, -(-2 * sum(replicas) // num_microbatches))
    return unroll(period, num_minibatches or enough)


def num_warmup(replicas: Sequence[int], stage: int) -> int:
    """Return how many forwards each replica of a stage runs ahead of its backwards."""
    return (sum(replicas[stage:]) - 1) // replicas[stage]


def _row(
    stage: int,
    replica: int,
    num_replicas: int,
    num_ahead: int,
    num_microbatches: int,
    version_of: VersionOf,
) -> Iterator[PeriodEntry]:
    """Yield forward i, then backward i - `num_ahead`, for the micro-batches of one replica."""
    own = range(replica, num_microbatches, num_replicas)
    for i, microbatch in enumerate(own):
        yield PeriodEntry(Action(stage, Kind.F, microbatch), version=version_of(stage, microbatch))
        back, position = divmod(i - num_ahead, len(own))
        version = version_of(stage, own[position])
        yield PeriodEntry(Action(stage, Kind.B, own[position]), -back, version)
        if position == len(own) - 1:
            yield PeriodEntry(Action(stage, Kind.STEP), -back, version=1)


def checked_replicas(
    replicas: Sequence[int] | None, num_ranks: int, num_microbatches: int
) -> tuple[int, ...]:
    """Return the number of ranks of each stage; raise `ScheduleError` for an invalid one."""
    if replicas is None:
        return (1,) * num_ranks
    counts = tuple(replicas) if isinstance(replicas, Sequence) else ()
    are_sizes = all(type(count) is int and count > 0 for count in counts)
    if not are_sizes or sum(counts) != num_ranks:
        raise ScheduleError(
            f"replicas is {shown(replicas)}, but must be one positive integer for each stage, with "
            f"sum {num_ranks}, the number of ranks"
        )
    for count in counts:
        if num_microbatches % count:
            raise ScheduleError(
                f"num_microbatches is {num_microbatches}, but a stage on {count} ranks needs a "
                f"multiple of {count}: use one, or other replicas"
            )
    return counts
