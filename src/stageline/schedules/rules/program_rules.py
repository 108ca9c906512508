"""The rules that a program keeps on top of those of its schedule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from stageline.schedules.action import COMPUTE, NO_VERSION, ONCE, Action, Kind
from stageline.schedules.grid import Cell
from stageline.schedules.placement import ranks_of, stages_by_rank
from stageline.schedules.precedence import run_lanes
from stageline.schedules.program.program import TWIN, Program, program_tasks, twin
from stageline.schedules.program.stream import made_from
from stageline.schedules.rules.rule import Offence, Rule, waiting_for_each_other


@dataclass(frozen=True)
class ProgramFacts:
    """Where the actions of a program stand, and which messages its edges call for."""

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
        """Those that are made."""
        schedule = self.program.schedule
        return range(1, schedule.num_minibatches + 1) if schedule.is_stream else (NO_VERSION,)

    @cached_property
    def messages(self) -> dict[Action, tuple[Action, Action]]:
        """By its send, each message's maker and reader."""
        routes, schedule = self.program.routes, self.program.schedule
        computed = [a for row in schedule.actions for a in row]
        makers = {send: action for action in computed for send in routes.sends(action)}
        readers = {send: action for action in computed for send in routes.awaited(action)}
        return {send: (maker, readers[send]) for send, maker in makers.items()}

    @cached_property
    def due(self) -> set[Action]:
        """Everything beside compute that must stand in the program once."""
        stages = range(len(self.program.placement))
        once = {
            Action(stage, kind, version=version)
            for stage in stages
            for kind in ONCE_A_STAGE
            for version in self.versions
        }
        extra = {
            action
            for stages in self.stages_before_a_step
            for version in self.versions
            for action in self.program.epilogue.actions(stages, version)
        }
        return once | extra | self.messages.keys() | {twin(send) for send in self.messages}

    @cached_property
    def stages_before_a_step(self) -> list[tuple[int, ...]]:
        """Return the stages that share an epilogue: each one in a stream, else those of a rank."""
        program = self.program
        if program.schedule.is_stream:
            return [(stage,) for stage in range(len(program.placement))]
        return stages_by_rank(program.placement, len(program.actions))

    def homes(self, action: Action) -> Sequence[int]:
        """The ranks on which an action belongs: one, or all that hold its stage."""
        program = self.program
        if action.kind in ONCE:
            return ranks_of(program.placement, program.replicas, action.stage)
        return (program.routes.home(action.stage, action.microbatch),)


ONCE_A_STAGE = (Kind.REDUCE_GRAD, Kind.STEP)
BEFORE_STEP = (Kind.REDUCE_TIED, Kind.UPDATE_STATS, Kind.CLIP_GRAD)


def uncalled(facts: ProgramFacts) -> Iterator[Offence]:
    for action, cells in facts.cells.items():
        if action.kind not in COMPUTE and action not in facts.due:
            yield Offence(cells, {"action": action})


def absent(facts: ProgramFacts) -> Iterator[Offence]:
    for action in sorted(facts.due):
        if len(facts.cells.get(action, ())) < len(facts.homes(action)):
            yield Offence(facts.cells.get(action, ()), {"action": action})


def several(facts: ProgramFacts) -> Iterator[Offence]:
    for action, cells in facts.cells.items():
        if len(cells) > len(facts.homes(action)):
            yield Offence(cells, {"action": action})


def abroad(facts: ProgramFacts) -> Iterator[Offence]:
    for action, cells in facts.cells.items():
        homes = facts.homes(action)
        for (rank, position), home in zip(cells, homes, strict=True):
            if rank != home:
                words = {"action": action, "rank": rank, "home": home}
                yield Offence([(rank, position)], words)


def sent_too_early(facts: ProgramFacts) -> Iterator[Offence]:
    for send, (maker, _) in facts.messages.items():
        yield from _unless_before(facts, maker, send)


def received_too_late(facts: ProgramFacts) -> Iterator[Offence]:
    for send, (_, reader) in facts.messages.items():
        yield from _unless_before(facts, twin(send), reader)


def _unless_before(facts: ProgramFacts, first: Action, second: Action) -> Iterator[Offence]:
    (early,), (late,) = facts.cells[first], facts.cells[second]
    if early > late:
        yield Offence([late, early], {"first": first, "second": second})


def out_of_turn(facts: ProgramFacts) -> Iterator[Offence]:
    """Receives of one rank from another in another order than the sends."""
    for row in facts.program.actions:
        latest: dict[int, Cell] = {}
        for send in row:
            if send.kind in TWIN:
                receive = twin(send)
                (cell,) = facts.cells[receive]
                (home,) = facts.homes(receive)
                previous = latest.setdefault(home, cell)
                if cell < previous:
                    yield Offence([cell, previous], {"action": receive, "send": send})
                latest[home] = cell


def after_the_end(facts: ProgramFacts) -> Iterator[Offence]:
    if facts.program.schedule.is_stream:
        return  # what comes after a step is for later mini-batches, and is judged in the schedule
    for row_number, row in enumerate(facts.program.actions):
        stepped: set[int] = set()
        for position, action in enumerate(row):
            if action.stage in stepped:
                words = {"action": action, "step": Action(action.stage, Kind.STEP)}
                yield Offence([(row_number, position)], words)
            if action.kind is Kind.STEP:
                stepped.add(action.stage)


def reduced_too_early(facts: ProgramFacts) -> Iterator[Offence]:
    size = facts.program.schedule.num_microbatches
    for row_number, row in enumerate(facts.program.actions):
        reduced: set[tuple[int, int]] = set()
        for position, action in enumerate(row):
            sum_of = action.stage, made_from(action, size)
            if action.kind in (Kind.B, Kind.W) and sum_of in reduced:
                reduction = Action(action.stage, Kind.REDUCE_GRAD, version=sum_of[1])
                words = {"action": action, "reduction": reduction}
                yield Offence([(row_number, position)], words)
            if action.kind is Kind.REDUCE_GRAD:
                reduced.add((action.stage, action.version))


def stepped_unprepared(facts: ProgramFacts) -> Iterator[Offence]:
    """Find actions of the epilogue that come after a step that needs them."""
    extra = facts.due - facts.messages.keys()
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
                        yield Offence(cells, {"first": action, "second": step})


def stepped_unreduced(facts: ProgramFacts) -> Iterator[Offence]:
    """In a stream; elsewhere a step is the end of its stage."""
    if not facts.program.schedule.is_stream:
        return
    for row_number, row in enumerate(facts.program.actions):
        reduced: set[tuple[int, int]] = set()
        for position, action in enumerate(row):
            if action.kind is Kind.REDUCE_GRAD:
                reduced.add((action.stage, action.version))
            if action.kind is Kind.STEP and (action.stage, action.version) not in reduced:
                reduction = action._replace(kind=Kind.REDUCE_GRAD)
                yield Offence([(row_number, position)], {"first": reduction, "second": action})


def deadlocked(facts: ProgramFacts, *, rendezvous: bool = False) -> Iterator[Offence]:
    program = facts.program
    tasks = program_tasks(program, lambda _: 0.0, rendezvous=rendezvous)
    run = run_lanes(tasks.lanes, [1.0] * tasks.num_tasks, tasks.waits)
    yield from waiting_for_each_other(program.actions, tasks.lanes, tasks.waits, run)


def deadlocked_by_rendezvous(facts: ProgramFacts) -> Iterator[Offence]:
    return deadlocked(facts, rendezvous=True)


PROGRAM_RULES = (
    Rule("only what edges call for", uncalled, "{action} belongs to no edge: remove it"),
    Rule("every message, reduction and step", absent, "{action} is missing: add it"),
    Rule("once", several, "{action} stands there more than once: keep one of them"),
    Rule(
        "on its own rank",
        abroad,
        "{action} stands on rank {rank}, but its stage is placed on rank {home}: move it there",
    ),
    Rule(
        "sent when made", sent_too_early, "{second} comes before {first}, which makes it: swap them"
    ),
    Rule(
        "asked for before it is used",
        received_too_late,
        "{first} comes after {second}, which needs it: swap them",
    ),
    Rule(
        "received in the order sent",
        out_of_turn,
        "{action} is asked for before messages sent earlier than {send}: ask in the order of sends",
    ),
    Rule(
        "reduced when complete",
        reduced_too_early,
        "{action} comes after {reduction}, which sums it over replicas: move the reduction back",
    ),
    Rule(
        "reduced before its step",
        stepped_unreduced,
        "{first} comes after {second}, which needs it: swap them",
    ),
    Rule(
        "epilogue before its step",
        stepped_unprepared,
        "{first} comes after {second}, which needs it: swap them",
    ),
    Rule(
        "nothing after the end",
        after_the_end,
        "{action} comes after {step}, the end of its stage: move it forward",
    ),
    Rule(
        "no deadlock, buffered sends", deadlocked, "{who}: {cycle}: change the order of one of them"
    ),
    Rule(
        "no deadlock, rendezvous sends",
        deadlocked_by_rendezvous,
        "{who} if sends wait for receives: {cycle}: move a receive forward",
    ),
)
