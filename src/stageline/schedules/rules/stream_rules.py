"""The rules that a stream keeps on top of every schedule's: versions of weights, and steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from stageline.schedules.action import COMPUTE, NO_VERSION, Action, Kind
from stageline.schedules.grid import Cell
from stageline.schedules.placement import ranks_of
from stageline.schedules.program.stream import made_from
from stageline.schedules.rules.rule import Offence, Rule
from stageline.schedules.schedule import Schedule

GRADIENTS = (Kind.W, Kind.B)


@dataclass(frozen=True)
class StreamFacts:
    """A stream, and what each rank does on each of its stages."""

    schedule: Schedule

    @cached_property
    def rows(self) -> dict[tuple[int, int], list[tuple[Cell, Action]]]:
        """By rank and stage, in the order of the rank."""
        rows: dict[tuple[int, int], list[tuple[Cell, Action]]] = {
            (rank, stage): []
            for stage in range(self.schedule.num_stages)
            for rank in ranks_of(self.schedule.placement, self.schedule.replicas, stage)
        }
        for rank, row in enumerate(self.schedule.actions):
            for position, action in enumerate(row):
                rows[rank, action.stage].append(((rank, position), action))
        return rows

    def made_from(self, action: Action) -> int:
        return made_from(action, self.schedule.num_microbatches)


def without_version(facts: StreamFacts) -> Iterator[Offence]:
    for row in facts.rows.values():
        for cell, action in row:
            if action.version == NO_VERSION:
                yield Offence([cell], {"action": action})


def uneven(facts: StreamFacts) -> Iterator[Offence]:
    schedule = facts.schedule
    if schedule.total_microbatches % schedule.num_minibatches:
        words = {"total": schedule.total_microbatches, "steps": schedule.num_minibatches}
        yield Offence([], words)


def steps_out_of_order(facts: StreamFacts) -> Iterator[Offence]:
    """Each row has the steps 1, 2, … up to the last, once each."""
    for (_, stage), row in facts.rows.items():
        steps = [(cell, action) for cell, action in row if action.kind is Kind.STEP]
        for version, (cell, action) in enumerate(steps, 1):
            if action.version != version:
                due = Action(stage, Kind.STEP, version=version)
                yield Offence([cell], {"action": action, "due": due})


def missing_steps(facts: StreamFacts) -> Iterator[Offence]:
    last = facts.schedule.num_minibatches
    for (rank, stage), row in facts.rows.items():
        found = sum(action.kind is Kind.STEP for _, action in row)
        if found < last:
            due = Action(stage, Kind.STEP, version=found + 1)
            yield Offence([row[-1][0]] if row else [], {"due": due, "rank": rank})


def not_made_yet(facts: StreamFacts) -> Iterator[Offence]:
    for row in facts.rows.values():
        made = 0
        for cell, action in row:
            if action.kind is Kind.STEP:
                made = action.version
            elif action.version > made:
                step = Action(action.stage, Kind.STEP, version=action.version)
                yield Offence([cell], {"action": action, "step": step})


def other_weights(facts: StreamFacts) -> Iterator[Offence]:
    """Gradients with other weights than their forward are gradients of nothing."""
    for row in facts.rows.values():
        forwards: dict[int, tuple[Cell, Action]] = {}
        for cell, action in row:
            if action.kind is Kind.F:
                forwards[action.microbatch] = cell, action
            elif action.kind in COMPUTE:
                before, forward = forwards[action.microbatch]
                if forward.version != action.version:
                    yield Offence([before, cell], {"action": action, "forward": forward})


def back_in_time(facts: StreamFacts) -> Iterator[Offence]:
    """A version that no forward will use again can be let go."""
    for row in facts.rows.values():
        latest: tuple[Cell, Action] | None = None
        for cell, action in row:
            if action.kind is Kind.F:
                if latest and latest[1].version > action.version:
                    yield Offence([latest[0], cell], {"action": action, "before": latest[1]})
                latest = cell, action


def stepped_too_early(facts: StreamFacts) -> Iterator[Offence]:
    for row in facts.rows.values():
        stepped: dict[int, tuple[Cell, Action]] = {}
        for cell, action in row:
            if action.kind is Kind.STEP:
                stepped[action.version] = cell, action
            elif action.kind in GRADIENTS and facts.made_from(action) in stepped:
                before, step = stepped[facts.made_from(action)]
                yield Offence([before, cell], {"action": action, "step": step})


def stepped_too_late(facts: StreamFacts) -> Iterator[Offence]:
    """Gradients of two mini-batches would be added up."""
    for row in facts.rows.values():
        made = 0
        for cell, action in row:
            if action.kind is Kind.STEP:
                made = action.version
            elif action.kind is not Kind.F and facts.made_from(action) > made + 1:
                step = Action(action.stage, Kind.STEP, version=made + 1)
                yield Offence([cell], {"action": action, "step": step})


STREAM_RULES = (
    Rule(
        "versions everywhere",
        without_version,
        "{action} names no version of its weights, but others do: add it, as in 2F0@1",
    ),
    Rule(
        "as many micro-batches for each step",
        uneven,
        "{total} micro-batches are not to be shared among {steps} steps: use a multiple",
    ),
    Rule("steps in order", steps_out_of_order, "{action} stands where {due} is due: swap them"),
    Rule("every step", missing_steps, "{due} is missing on rank {rank}: add it"),
    Rule(
        "weights that exist",
        not_made_yet,
        "{action} comes before {step}, which makes its weights: swap them, or use an older version",
    ),
    Rule(
        "the weights of its forward",
        other_weights,
        "{action} uses other weights than {forward}: a gradient needs those of its forward",
    ),
    Rule(
        "versions never go back",
        back_in_time,
        "{action} uses older weights than {before}: versions that were left behind are gone",
    ),
    Rule(
        "stepped when complete",
        stepped_too_early,
        "{action} comes after {step}, which needs its gradient: swap them",
    ),
    Rule(
        "stepped before the next",
        stepped_too_late,
        "{action} comes before {step}, so gradients of two steps would be added: swap them",
    ),
)
