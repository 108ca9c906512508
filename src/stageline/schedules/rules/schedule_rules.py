"""Define the rules that every schedule must satisfy, as a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from stageline.arguments import shown
from stageline.schedules.action import COMPUTE, NO_PEER, NO_VERSION, WHOLE_BATCH, Action, Kind
from stageline.schedules.edges import chain
from stageline.schedules.marked_grid import Cell
from stageline.schedules.placement import ranks_of, side_by_side
from stageline.schedules.program.insert_communication import insert_communication
from stageline.schedules.rules.program_rules import ProgramFacts
from stageline.schedules.rules.program_rules import deadlocked as deadlocked_program
from stageline.schedules.rules.rule import Rule, Violation, waiting_for_each_other
from stageline.schedules.schedule import Schedule, is_integer, is_scheduled
from stageline.schedules.task_graph import TaskNumbering, dependencies_of, run_lanes


@dataclass(frozen=True)
class ScheduleFacts:
    """The positions of a schedule's actions.

    A place is a stage and a micro-batch as one number: stage × num_microbatches + micro-batch.
    """

    schedule: Schedule

    @cached_property
    def cells(self) -> dict[Kind, dict[int, Cell]]:
        """Return the last cell of each action, by kind and place."""
        cells: dict[Kind, dict[int, Cell]] = {kind: {} for kind in Kind}
        num_microbatches = self.schedule.total_microbatches
        for rank, row in enumerate(self.schedule.actions):
            for position, (stage, kind, microbatch, _, _) in enumerate(row):
                cells[kind][stage * num_microbatches + microbatch] = (rank, position)
        return cells

    @property
    def num_places(self) -> int:
        return self.schedule.num_stages * self.schedule.total_microbatches

    def all_cells(self) -> Iterator[tuple[Cell, Action]]:
        for rank, row in enumerate(self.schedule.actions):
            for position, action in enumerate(row):
                yield (rank, position), action

    def action(self, kind: Kind, place: int) -> Action:
        stage, microbatch = divmod(place, self.schedule.total_microbatches)
        return Action(stage, kind, microbatch)


def no_actions(facts: ScheduleFacts) -> Iterator[Violation]:
    if not any(facts.schedule.actions):
        yield Violation([], {"num_ranks": facts.schedule.num_ranks})


def not_integers(facts: ScheduleFacts) -> Iterator[Violation]:
    for cell, action in facts.all_cells():
        stage, _, *others = action
        if not is_integer(stage) or not all(map(is_integer, others)):
            yield Violation([cell], {"action": shown(tuple(action))})


def unknown_ranks(facts: ScheduleFacts) -> Iterator[Violation]:
    """Yield stages that are placed on ranks that do not exist."""
    ranks = range(facts.schedule.num_ranks)
    for stage, rank in enumerate(facts.schedule.placement):
        if rank not in ranks:
            yield Violation([], {"stage": stage, "rank": rank, "last": len(ranks) - 1})


def with_peers(facts: ScheduleFacts) -> Iterator[Violation]:
    for cell, action in facts.all_cells():
        if action.peer != NO_PEER:
            yield Violation([cell], {"action": action, "peer": action.peer})


def unknown_kinds(facts: ScheduleFacts) -> Iterator[Violation]:
    for cell, action in facts.all_cells():
        if type(action.kind) is not Kind:
            yield Violation([cell], {"action": action, "kind": action.kind})


def not_scheduled(facts: ScheduleFacts) -> Iterator[Violation]:
    for cell, action in facts.all_cells():
        if not is_scheduled(action):
            yield Violation([cell], {"action": action})


def out_of_range(facts: ScheduleFacts) -> Iterator[Violation]:
    num_stages = facts.schedule.num_stages
    for cell, action in facts.all_cells():
        is_step = action.kind is Kind.STEP
        is_known = action.microbatch == WHOLE_BATCH if is_step else action.microbatch >= 0
        if not 0 <= action.stage < num_stages or not is_known or action.version < NO_VERSION:
            yield Violation([cell], {"action": action, "last": num_stages - 1})


def ranks_without_stage(facts: ScheduleFacts) -> Iterator[Violation]:
    for rank in range(facts.schedule.num_ranks):
        if not facts.schedule.stages_of(rank):
            yield Violation([], {"rank": rank})


def invalid_replicas(facts: ScheduleFacts) -> Iterator[Violation]:
    """Yield a violation if stages with replicas do not each have ranks of their own, in order."""
    placement, replicas = facts.schedule.placement, facts.schedule.replicas
    are_sizes = all(type(count) is int and count > 0 for count in replicas)
    if replicas and (not are_sizes or placement != side_by_side(replicas)):
        yield Violation([], {"replicas": list(replicas), "placement": list(placement)})


def misplaced(facts: ScheduleFacts) -> Iterator[Violation]:
    placement, replicas = facts.schedule.placement, facts.schedule.replicas
    for cell, action in facts.all_cells():
        is_step = action.kind is Kind.STEP
        if is_step and cell[0] in ranks_of(placement, replicas, action.stage):
            continue
        rank = facts.schedule.rank_of(action.stage, 0 if is_step else action.microbatch)
        if rank != cell[0]:
            yield Violation([cell], {"action": action, "rank": cell[0], "right": rank})


def repeated(facts: ScheduleFacts) -> Iterator[Violation]:
    num_actions = sum(map(len, facts.schedule.actions))
    if num_actions == sum(map(len, facts.cells.values())):
        return
    seen: dict[Action, Cell] = {}
    for cell, action in facts.all_cells():
        if action.kind is Kind.STEP:
            continue  # it runs once on each rank that holds the stage
        action = action._replace(version=NO_VERSION)  # noqa: PLW2901  with any weights
        if seen.setdefault(action, cell) is not cell:
            yield Violation([seen[action], cell], {"action": action})


def whole_and_halves(facts: ScheduleFacts) -> Iterator[Violation]:
    for half in (Kind.I, Kind.W):
        for place in facts.cells[Kind.B].keys() & facts.cells[half].keys():
            cells = [facts.cells[kind][place] for kind in (Kind.B, half)]
            values = {"whole": facts.action(Kind.B, place), "half": facts.action(half, place)}
            yield Violation(cells, values)


def missing(*kinds: Kind) -> Callable[[ScheduleFacts], Iterator[Violation]]:
    """Return a finder of places where none of these kinds runs."""

    def find(facts: ScheduleFacts) -> Iterator[Violation]:
        tables = [facts.cells[kind] for kind in kinds]
        if sum(map(len, tables)) == facts.num_places:
            return
        for place in range(facts.num_places):
            if not any(place in table for table in tables):
                yield _missing_action(facts, kinds[0], place)

    return find


def _missing_action(facts: ScheduleFacts, kind: Kind, place: int) -> Violation:
    """Return the violation; it marks the last action of the micro-batch on its stage.

    If there is none, it marks the action that sets the number of micro-batches: a wrong number in
    a file looks like an additional micro-batch, which is then missing everywhere else.
    """
    cells = [table[place] for table in facts.cells.values() if place in table]
    last = facts.schedule.total_microbatches - 1
    witness = next(cell for cell, action in facts.all_cells() if action.microbatch == last)
    values = {"action": facts.action(kind, place), "whole": facts.action(Kind.B, place)}
    values["witness"] = facts.schedule.actions[witness[0]][witness[1]]
    return Violation([max(cells)] if cells else [witness], values)


def before(first: Kind, second: Kind) -> Callable[[ScheduleFacts], Iterator[Violation]]:
    """Return a finder of places where the second kind runs before the first."""

    def find(facts: ScheduleFacts) -> Iterator[Violation]:
        needed = facts.cells[first]
        for place, cell in facts.cells[second].items():
            if needed[place] > cell:
                values = {"early": facts.action(second, place), "late": facts.action(first, place)}
                yield Violation([cell, needed[place]], values)

    return find


def uneven_replicas(facts: ScheduleFacts) -> Iterator[Violation]:
    """Yield stages with a replica that gets no gradient to reduce, while others wait for it."""
    num_microbatches = facts.schedule.num_microbatches
    for stage, count in enumerate(facts.schedule.replicas):
        if num_microbatches % count:
            yield Violation([], {"total": num_microbatches, "count": count, "stage": stage})


def deadlocked(facts: ScheduleFacts) -> Iterator[Violation]:
    schedule = facts.schedule
    if schedule.replicas:  # their steps wait for each other
        program = insert_communication(schedule)
        yield from _marked_in(schedule, program.actions, deadlocked_program(ProgramFacts(program)))
        return
    rows = [[a for a in row if a.kind in COMPUTE] for row in schedule.actions]
    numbering = TaskNumbering(schedule.num_stages, schedule.total_microbatches)
    lanes = [numbering.lane(row) for row in rows]
    dependencies = dependencies_of(numbering, chain(schedule.num_stages), lambda *_: 0.0)
    run = run_lanes(lanes, [1.0] * numbering.num_tasks, dependencies)
    yield from _marked_in(schedule, rows, waiting_for_each_other(rows, lanes, dependencies, run))


def _marked_in(
    schedule: Schedule, rows: Sequence[Sequence[Action]], violations: Iterator[Violation]
) -> Iterator[Violation]:
    """Yield violations found in other rows, with the cells of the same actions in the schedule."""
    for cells, values in violations:
        found = [(rank, schedule.actions[rank].index(rows[rank][i])) for rank, i in cells]
        yield Violation(found, values)


NEEDED = "{early} comes before {late}, which it needs: swap them"
SCHEDULE_RULES = (
    Rule("not empty", no_actions, "{num_ranks} ranks have no actions: is this a schedule?"),
    Rule("known kinds", unknown_kinds, "the kind of {action} is {kind!r}: use one of sl.Kind"),
    Rule(
        "integers",
        not_integers,
        "{action} is not a valid action: its stage, micro-batch, peer and version must be "
        "integers, as in sl.Action(2, sl.Kind.F, 0)",
    ),
    Rule(
        "known ranks",
        unknown_ranks,
        "stage {stage} is placed on rank {rank}, but ranks go from 0 to {last}: place it on one of "
        "these",
    ),
    Rule(
        "only compute",
        not_scheduled,
        "{action} is in a schedule, which has only F, I, W and B: remove it, lower() will add it",
    ),
    Rule(
        "no peers",
        with_peers,
        "{action} has stage {peer} as its peer, but only sends and receives have one: omit it",
    ),
    Rule(
        "known stages and micro-batches",
        out_of_range,
        "{action} is out of range: stages go from 0 to {last}, micro-batches and versions start at "
        "0",
    ),
    Rule(
        "replicas side by side",
        invalid_replicas,
        "stages with {replicas} replicas are placed on ranks {placement}, but each rank must hold "
        "one stage, in the order of the stages: place each stage after the ranks of the previous",
    ),
    Rule(
        "every rank holds a stage",
        ranks_without_stage,
        "rank {rank} holds no stage: place one there, or use fewer ranks",
    ),
    Rule(
        "on its own rank",
        misplaced,
        "{action} is on rank {rank}, but its stage is placed on rank {right}: move it there",
    ),
    Rule("once", repeated, "{action} runs more than once: keep one of them"),
    Rule(
        "B, or I and W",
        whole_and_halves,
        "{whole} and {half} both run, but B contains I and W: keep B, or I and W",
    ),
    Rule(
        "every forward",
        missing(Kind.F),
        "{action} is missing, but {witness} implies as many micro-batches on every stage: add it",
    ),
    Rule(
        "every gradient",
        missing(Kind.I, Kind.B),
        "{action} is missing, and so is {whole}: add one of them",
    ),
    Rule(
        "activations are released",
        missing(Kind.W, Kind.B),
        "{action} is missing, so its activation is never released: add it",
    ),
    Rule("forward before its gradient", before(Kind.F, Kind.I), NEEDED),
    Rule("forward before its backward", before(Kind.F, Kind.B), NEEDED),
    Rule("input gradient before weight gradient", before(Kind.I, Kind.W), NEEDED),
    Rule(
        "micro-batches for every replica",
        uneven_replicas,
        "{total} micro-batches cannot be shared evenly by the {count} ranks of stage {stage}: use "
        "a multiple of {count} micro-batches, or other replicas",
    ),
)
DEADLOCK_RULES = (
    Rule("no deadlock", deadlocked, "{who}: {cycle}: change the order of one of them"),
)
