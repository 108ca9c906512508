"""Define the rules for streams: weight versions and optimizer steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from stageline.schedules.action import COMPUTE, NO_VERSION, Action, Kind
from stageline.schedules.marked_grid import Cell
from stageline.schedules.placement import ranks_of
from stageline.schedules.program.stream import version_made_from
from stageline.schedules.rules.rule import Rule, Violation
from stageline.schedules.schedule import Schedule

GRADIENTS = (Kind.W, Kind.B)


@dataclass(frozen=True)
class StreamFacts:
    """A stream, with its actions by rank and stage."""

    schedule: Schedule

    @cached_property
    def rows(self) -> dict[tuple[int, int], list[tuple[Cell, Action]]]:
        """Return the actions by (rank, stage), in the order of the rank."""
        rows: dict[tuple[int, int], list[tuple[Cell, Action]]] = {
            (rank, stage): []
            for stage in range(self.schedule.num_stages)
            for rank in ranks_of(self.schedule.placement, self.schedule.replicas, stage)
        }
        for rank, row in enumerate(self.schedule.actions):
            for position, action in enumerate(row):
                rows[rank, action.stage].append(((rank, position), action))
        return rows

    def version_made_from(self, action: Action) -> int:
        return version_made_from(action, self.schedule.num_microbatches)


def missing_versions(facts: StreamFacts) -> Iterator[Violation]:
    for row in facts.rows.values():
        for cell, action in row:
            if action.version == NO_VERSION:
                yield Violation([cell], {"action": action})


def uneven_minibatches(facts: StreamFacts) -> Iterator[Violation]:
    schedule = facts.schedule
    if schedule.total_microbatches % schedule.num_minibatches:
        values = {"total": schedule.total_microbatches, "steps": schedule.num_minibatches}
        yield Violation([], values)


def steps_out_of_order(facts: StreamFacts) -> Iterator[Violation]:
    """Yield steps of a row that are not 1, 2, … in this order."""
    for (_, stage), row in facts.rows.items():
        steps = [(cell, action) for cell, action in row if action.kind is Kind.STEP]
        for version, (cell, action) in enumerate(steps, 1):
            if action.version != version:
                due = Action(stage, Kind.STEP, version=version)
                yield Violation([cell], {"action": action, "due": due})


def missing_steps(facts: StreamFacts) -> Iterator[Violation]:
    last = facts.schedule.num_minibatches
    for (rank, stage), row in facts.rows.items():
        found = sum(action.kind is Kind.STEP for _, action in row)
        if found < last:
            due = Action(stage, Kind.STEP, version=found + 1)
            yield Violation([row[-1][0]] if row else [], {"due": due, "rank": rank})


def versions_not_made_yet(facts: StreamFacts) -> Iterator[Violation]:
    for row in facts.rows.values():
        made = 0
        for cell, action in row:
            if action.kind is Kind.STEP:
                made = action.version
            elif action.version > made:
                step = Action(action.stage, Kind.STEP, version=action.version)
                yield Violation([cell], {"action": action, "step": step})


def different_weights(facts: StreamFacts) -> Iterator[Violation]:
    """Yield gradients computed with weights other than those of their forward."""
    for row in facts.rows.values():
        forwards: dict[int, tuple[Cell, Action]] = {}
        for cell, action in row:
            if action.kind is Kind.F:
                forwards[action.microbatch] = cell, action
            elif action.kind in COMPUTE:
                before, forward = forwards[action.microbatch]
                if forward.version != action.version:
                    yield Violation([before, cell], {"action": action, "forward": forward})


def older_versions(facts: StreamFacts) -> Iterator[Violation]:
    """Yield forwards that use an older version than an earlier forward: it is already freed."""
    for row in facts.rows.values():
        latest: tuple[Cell, Action] | None = None
        for cell, action in row:
            if action.kind is Kind.F:
                if latest and latest[1].version > action.version:
                    yield Violation([latest[0], cell], {"action": action, "before": latest[1]})
                latest = cell, action


def minibatches_out_of_order(facts: StreamFacts) -> Iterator[Violation]:
    """Yield forwards of a mini-batch that come after those of a later one.

    Messages are received in the order in which they are sent, none before its mini-batch begins.
    """
    size = facts.schedule.num_microbatches
    for row in facts.rows.values():
        latest: tuple[Cell, Action] | None = None
        for cell, action in row:
            if action.kind is Kind.F:
                if latest and action.microbatch // size < latest[1].microbatch // size:
                    yield Violation([latest[0], cell], {"action": action, "later": latest[1]})
                else:
                    latest = cell, action


def stepped_too_early(facts: StreamFacts) -> Iterator[Violation]:
    for row in facts.rows.values():
        stepped: dict[int, tuple[Cell, Action]] = {}
        for cell, action in row:
            if action.kind is Kind.STEP:
                stepped[action.version] = cell, action
            elif action.kind in GRADIENTS and facts.version_made_from(action) in stepped:
                before, step = stepped[facts.version_made_from(action)]
                yield Violation([before, cell], {"action": action, "step": step})


def stepped_too_late(facts: StreamFacts) -> Iterator[Violation]:
    """Yield gradients that would be added to those of an earlier mini-batch."""
    for row in facts.rows.values():
        made = 0
        for cell, action in row:
            if action.kind is Kind.STEP:
                made = action.version
            elif action.kind is not Kind.F and facts.version_made_from(action) > made + 1:
                step = Action(action.stage, Kind.STEP, version=made + 1)
                yield Violation([cell], {"action": action, "step": step})


STREAM_RULES = (
    Rule(
        "every action has a version",
        missing_versions,
        "{action} names no version of its weights, but others do: add it, as in 2F0@1",
    ),
    Rule(
        "the same number of micro-batches for every step",
        uneven_minibatches,
        "{total} micro-batches cannot be shared evenly by {steps} steps: use a multiple of {steps}",
    ),
    Rule(
        "steps in order", steps_out_of_order, "{action} is found where {due} should be: swap them"
    ),
    Rule("every step", missing_steps, "{due} is missing on rank {rank}: add it"),
    Rule(
        "weights exist before they are used",
        versions_not_made_yet,
        "{action} comes before {step}, which makes its weights: swap them, or use an older version",
    ),
    Rule(
        "gradients use the weights of their forward",
        different_weights,
        "{action} uses different weights than {forward}: give both the same version",
    ),
    Rule(
        "versions never decrease",
        older_versions,
        "{action} uses older weights than {before}, but these are freed by then: use its version",
    ),
    Rule(
        "mini-batches in order",
        minibatches_out_of_order,
        "{action} comes after {later} of a later mini-batch: swap them",
    ),
    Rule(
        "step after its gradients",
        stepped_too_early,
        "{action} comes after {step}, which needs its gradient: swap them",
    ),
    Rule(
        "step before the next gradients",
        stepped_too_late,
        "{action} comes before {step}, so gradients of two steps would be summed: swap them",
    ),
)
