"""Define the rules that a program must satisfy in addition to those of its schedule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from stageline.schedules.action import COMPUTE, NO_VERSION, ONCE, Action, Kind
from stageline.schedules.marked_grid import Cell
from stageline.schedules.placement import ranks_of, stages_by_rank
from stageline.schedules.program.program import RECEIVE_KIND, Program, program_tasks, receive_of
from stageline.schedules.program.stream import version_made_from
from stageline.schedules.rules.rule import Rule, Violation, waiting_for_each_other
from stageline.schedules.task_graph import run_lanes


@dataclass(frozen=True)
class ProgramFacts:
    """The positions of a program's actions, and the messages that its edges require."""

    program: Program

    @cached_property
    def cells(self) -> dict[Action, list[Cell]]:
        cells: dict[Action, list[Cell]] = {}
        for rank, row in enumerate(self.program.actions):
            for position, action in enumerate(row):
                cells.setdefault(action, []).append((rank, position))
        return cells

    @cached_property
    def versions(self) -> range | tuple[int]:
        """Return the versions of the weights that the program makes."""
        schedule = self.program.schedule
        return range(1, schedule.num_minibatches + 1) if schedule.is_stream else (NO_VERSION,)

    @cached_property
    def messages(self) -> dict[Action, tuple[Action, Action]]:
        """Return the action that makes each message and the one that reads it, by its send."""
        routes, schedule = self.program.routes, self.program.schedule
        computed = [a for row in schedule.actions for a in row]
        makers = {send: action for action in computed for send in routes.sends(action)}
        readers = {send: action for action in computed for send in routes.awaited(action)}
        return {send: (maker, readers[send]) for send, maker in makers.items()}

    @cached_property
    def required(self) -> set[Action]:
        """Return all actions, other than compute, that must be in the program once."""
        stages = range(len(self.program.placement))
        once = {
            Action(stage, kind, version=version)
            for stage in stages
            for kind in ONCE_PER_STAGE
            for version in self.versions
        }
        extra = {
            action
            for stages in self.stages_before_a_step
            for version in self.versions
            for action in self.program.epilogue.actions(stages, version)
        }
        return once | extra | self.messages.keys() | {receive_of(send) for send in self.messages}

    @cached_property
    def stages_before_a_step(self) -> list[tuple[int, ...]]:
        """Return the stages that share an epilogue: each one in a stream, else those of a rank."""
        program = self.program
        if program.schedule.is_stream:
            return [(stage,) for stage in range(len(program.placement))]
        return stages_by_rank(program.placement, len(program.actions))

    def ranks_of(self, action: Action) -> Sequence[int]:
        """Return the ranks that must run an action: one, or all that hold its stage."""
        program = self.program
        if action.kind in ONCE:
            return ranks_of(program.placement, program.replicas, action.stage)
        return (program.routes.rank_of(action.stage, action.microbatch),)


ONCE_PER_STAGE = (Kind.REDUCE_GRAD, Kind.STEP)
BEFORE_STEP = (Kind.REDUCE_TIED, Kind.UPDATE_STATS, Kind.CLIP_GRAD)


def not_required(facts: ProgramFacts) -> Iterator[Violation]:
    for action, cells in facts.cells.items():
        if action.kind not in COMPUTE and action not in facts.required:
            yield Violation(cells, {"action": action})


def missing(facts: ProgramFacts) -> Iterator[Violation]:
    for action in sorted(facts.required):
        if len(facts.cells.get(action, ())) < len(facts.ranks_of(action)):
            yield Violation(facts.cells.get(action, ()), {"action": action})


def repeated(facts: ProgramFacts) -> Iterator[Violation]:
    for action, cells in facts.cells.items():
        if len(cells) > len(facts.ranks_of(action)):
            yield Violation(cells, {"action": action})


def misplaced(facts: ProgramFacts) -> Iterator[Violation]:
    for action, cells in facts.cells.items():
        for (rank, position), right in zip(cells, facts.ranks_of(action), strict=True):
            if rank != right:
                values = {"action": action, "rank": rank, "right": right}
                yield Violation([(rank, position)], values)


def sent_too_early(facts: ProgramFacts) -> Iterator[Violation]:
    for send, (maker, _) in facts.messages.items():
        yield from _unless_before(facts, maker, send)


def received_too_late(facts: ProgramFacts) -> Iterator[Violation]:
    for send, (_, reader) in facts.messages.items():
        yield from _unless_before(facts, receive_of(send), reader)


def _unless_before(facts: ProgramFacts, first: Action, second: Action) -> Iterator[Violation]:
    (early,), (late,) = facts.cells[first], facts.cells[second]
    if early > late:
        yield Violation([late, early], {"first": first, "second": second})


def received_out_of_order(facts: ProgramFacts) -> Iterator[Violation]:
    """Yield receives that are not in the order in which the other rank sends."""
    for row in facts.program.actions:
        latest: dict[int, Cell] = {}
        for send in row:
            if send.kind in RECEIVE_KIND:
                receive = receive_of(send)
                (cell,) = facts.cells[receive]
                (rank,) = facts.ranks_of(receive)
                previous = latest.setdefault(rank, cell)
                if cell < previous:
                    yield Violation([cell, previous], {"action": receive, "send": send})
                latest[rank] = cell


def after_the_step(facts: ProgramFacts) -> Iterator[Violation]:
    if facts.program.schedule.is_stream:
        return  # actions after a step belong to later mini-batches; the stream rules cover them
    for row_number, row in enumerate(facts.program.actions):
        stepped: set[int] = set()
        for position, action in enumerate(row):
            if action.stage in stepped:
                values = {"action": action, "step": Action(action.stage, Kind.STEP)}
                yield Violation([(row_number, position)], values)
            if action.kind is Kind.STEP:
                stepped.add(action.stage)


def reduced_too_early(facts: ProgramFacts) -> Iterator[Violation]:
    size = facts.program.schedule.num_microbatches
    for row_number, row in enumerate(facts.program.actions):
        reduced: set[tuple[int, int]] = set()
        for position, action in enumerate(row):
            sum_of = action.stage, version_made_from(action, size)
            if action.kind in (Kind.B, Kind.W) and sum_of in reduced:
                reduction = Action(action.stage, Kind.REDUCE_GRAD, version=sum_of[1])
                values = {"action": action, "reduction": reduction}
                yield Violation([(row_number, position)], values)
            if action.kind is Kind.REDUCE_GRAD:
                reduced.add((action.stage, action.version))


def stepped_before_epilogue(facts: ProgramFacts) -> Iterator[Violation]:
    """Yield actions of the epilogue that come after a step that needs them."""
    extra = facts.required - facts.messages.keys()
    for row_number, row in enumerate(facts.program.actions):
        steps: list[tuple[int, Action]] = []
        for position, action in enumerate(row):
            if action.kind is Kind.STEP:
                steps.append((position, action))
            elif action in extra and action.kind in BEFORE_STEP:
                for before, step in steps:
                    is_needed = step.version == action.version and (
                        action.kind is not Kind.UPDATE_STATS or step.stage == action.stage
                    )
                    if is_needed:
                        cells = [(row_number, before), (row_number, position)]
                        yield Violation(cells, {"first": action, "second": step})


def stepped_unreduced(facts: ProgramFacts) -> Iterator[Violation]:
    """Yield steps of a stream without a reduction before them; `after_the_step` covers the rest."""
    if not facts.program.schedule.is_stream:
        return
    for row_number, row in enumerate(facts.program.actions):
        reduced: set[tuple[int, int]] = set()
        for position, action in enumerate(row):
            if action.kind is Kind.REDUCE_GRAD:
                reduced.add((action.stage, action.version))
            if action.kind is Kind.STEP and (action.stage, action.version) not in reduced:
                reduction = action._replace(kind=Kind.REDUCE_GRAD)
                yield Violation([(row_number, position)], {"first": reduction, "second": action})


def deadlocked(facts: ProgramFacts, *, rendezvous: bool = False) -> Iterator[Violation]:
    program = facts.program
    tasks = program_tasks(program, lambda _: 0.0, rendezvous=rendezvous)
    run = run_lanes(tasks.lanes, [1.0] * tasks.num_tasks, tasks.dependencies)
    yield from waiting_for_each_other(program.actions, tasks.lanes, tasks.dependencies, run)


def deadlocked_by_rendezvous(facts: ProgramFacts) -> Iterator[Violation]:
    return deadlocked(facts, rendezvous=True)


PROGRAM_RULES = (
    Rule("only what the edges require", not_required, "{action} belongs to no edge: remove it"),
    Rule("every message, reduction and step", missing, "{action} is missing: add it"),
    Rule("once", repeated, "{action} appears more than once: keep one of them"),
    Rule(
        "on its own rank",
        misplaced,
        "{action} is on rank {rank}, but its stage is placed on rank {right}: move it there",
    ),
    Rule(
        "sent when made", sent_too_early, "{second} comes before {first}, which makes it: swap them"
    ),
    Rule(
        "received before it is used",
        received_too_late,
        "{first} comes after {second}, which needs it: swap them",
    ),
    Rule(
        "received in the order sent",
        received_out_of_order,
        "{action} comes before receives of messages that are sent before {send}: receive messages "
        "in the order in which they are sent",
    ),
    Rule(
        "reduced when complete",
        reduced_too_early,
        "{action} comes after {reduction}, which sums it over replicas: put the reduction after it",
    ),
    Rule(
        "reduced before its step",
        stepped_unreduced,
        "{first} comes after {second}, which needs it: swap them",
    ),
    Rule(
        "epilogue before its step",
        stepped_before_epilogue,
        "{first} comes after {second}, which needs it: swap them",
    ),
    Rule(
        "nothing after the step",
        after_the_step,
        "{action} comes after {step}, the last action of its stage: move it before the step",
    ),
    Rule(
        "no deadlock, buffered sends", deadlocked, "{who}: {cycle}: change the order of one of them"
    ),
    Rule(
        "no deadlock, rendezvous sends",
        deadlocked_by_rendezvous,
        "{who} if sends wait for receives: {cycle}: move a receive to an earlier position",
    ),
)
