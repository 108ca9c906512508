"""Divide each rank's time in a step into parts: work, waiting, and what is between two steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from stageline.report.spans import Span
from stageline.report.timeline import Timeline
from stageline.runs.records import Metrics
from stageline.schedules.action import Action, Kind

PART_OF_KIND = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "input gradient",
    Kind.W: "weight gradient",
    Kind.STEP: "optimizer",
}
# in the order in which they are drawn; each rank has those that took time
PARTS = (
    *("forward", "recomputation", "backward", "input gradient", "weight gradient"),
    *("transfer", "imbalance", "bubble", "host", "idle", "optimizer", "data", "saving"),
)


@dataclass(frozen=True)
class RankTime:
    """Where a rank's time went, in milliseconds.

    `transfer` is waiting for a message in transit, `bubble` what the schedule leaves idle if all
    stages take equally long, `imbalance` further waiting because they do not, `host` the time
    between actions although nothing was missing. `idle` is all four, if they are not known. Of a
    mean step, and those of its process: `optimizer` (with clipping and scheduler), `data` (waiting
    for the loader) and `saving` (waiting for checkpoints).
    """

    rank: int
    parts: dict[str, float]  # by names of `PARTS`

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def rank_times(timeline: Timeline, metrics: Metrics | None) -> tuple[RankTime, ...]:
    """Return the parts of a recorded step, and the mean time of what is between two steps."""
    return tuple(_rank_time(timeline, metrics, rank) for rank in range(timeline.num_ranks))


def recomputations(row: Sequence[Span]) -> list[bool]:
    """Return whether each span is recomputation: an action recorded twice recomputes first."""
    left = Counter(span.action for span in row)
    found = []
    for span in row:
        left[span.action] -= 1
        found.append(left[span.action] > 0)
    return found


def actions_once(row: Sequence[Span]) -> tuple[Action, ...]:
    """Return the actions of a rank without those that recomputed."""
    pairs = zip(row, recomputations(row), strict=True)
    return tuple(span.action for span, is_again in pairs if not is_again)


def of_rank(by_process: Sequence[float], rank: int, num_ranks: int) -> float:
    """Return the value of a rank's process; the mean, if processes are not ranks."""
    if len(by_process) == num_ranks:
        return by_process[rank]
    return sum(by_process) / max(len(by_process), 1)


def _rank_time(timeline: Timeline, metrics: Metrics | None, rank: int) -> RankTime:
    parts = dict.fromkeys(PARTS, 0.0)
    row = timeline.spans[rank]
    for (action, start, end), is_again in zip(row, recomputations(row), strict=True):
        name = "recomputation" if is_again else PART_OF_KIND.get(action.kind, "host")
        parts[name] += end - start
    if timeline.idle:
        for name, time in timeline.idle[rank]._asdict().items():
            parts[name] += time
    else:
        parts["idle"] = timeline.makespan - timeline.busy[rank]
    if metrics is not None:
        for name, seconds in _between_steps(metrics).items():
            parts[name] += 1e3 * of_rank(seconds, rank, timeline.num_ranks)
    return RankTime(rank, {name: time for name, time in parts.items() if time > 0})


def _between_steps(metrics: Metrics) -> dict[str, Sequence[float]]:
    return {
        "optimizer": metrics.optimizer_seconds,
        "data": metrics.data_seconds,
        "saving": metrics.save_seconds,
    }
