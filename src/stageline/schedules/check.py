"""The rules that every schedule keeps, as a table, and the check that names the first broken."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from stageline.arguments import check_type, shown
from stageline.schedules.action import COMPUTE, NO_PEER, NO_VERSION, WHOLE_BATCH, Action, Kind
from stageline.schedules.edges import chain, checked_edges
from stageline.schedules.grid import Cell
from stageline.schedules.placement import ranks_of, side_by_side
from stageline.schedules.precedence import Numbering, run_lanes, waits_of
from stageline.schedules.program.lowering import lowered
from stageline.schedules.program.program import Program
from stageline.schedules.rules.program_rules import PROGRAM_RULES, ProgramFacts
from stageline.schedules.rules.program_rules import deadlocked as deadlocked_program
from stageline.schedules.rules.rule import Offence, Rule, enforce, waiting_for_each_other
from stageline.schedules.rules.stream_rules import STREAM_RULES, StreamFacts
from stageline.schedules.schedule import Schedule, is_scheduled, is_whole


def check(work: Schedule | Program) -> None:
    """Raise a `ScheduleError` that shows the first broken rule in the grid; return if none is.

    A schedule has no sends; `lower` adds them such that what cannot deadlock with buffered sends
    cannot with rendezvous sends. Checking the program proves both, wherever it comes from.

    >>> check(Schedule.from_text("0F0 0B0", "1F0 1B0"))
    >>> check(Schedule.from_text("0F0 0B0", "1B0 1F0"))
    Traceback (most recent call last):
    stageline.errors.ScheduleError: 1B0 comes before 1F0, which it needs: swap them
    rank 0 │  0F0   0B0
    rank 1 │ >1B0< >1F0<
    """
    check_type("a schedule", work, (Schedule, Program), "build one with sl.build_schedule")
    if JUDGED in work.__dict__:
        return
    if isinstance(work, Program):
        check(work.schedule)
        checked_edges(work.edges, len(work.placement))
        enforce(PROGRAM_RULES, ProgramFacts(work), work.actions)
    else:
        enforce(RULES, Facts(work), work.actions)
        if work.is_stream:
            enforce(STREAM_RULES, StreamFacts(work), work.actions)
        enforce(DEADLOCK, Facts(work), work.actions)
    work.__dict__[JUDGED] = True


JUDGED = "is_judged"  # a value never changes: one that passed once is not judged again


@dataclass(frozen=True)
class Facts:
    """Where everything stands; a place is the number stage × num_microbatches + micro-batch."""

    schedule: Schedule

    @cached_property
    def cells(self) -> dict[Kind, dict[int, Cell]]:
        """By kind and place, the last cell with that action."""
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


def empty(facts: Facts) -> Iterator[Offence]:
    if not any(facts.schedule.actions):
        yield Offence([], {"num_ranks": facts.schedule.num_ranks})


def not_numbers(facts: Facts) -> Iterator[Offence]:
    for cell, action in facts.all_cells():
        stage, _, *others = action
        if not is_whole(stage) or not all(map(is_whole, others)):
            yield Offence([cell], {"action": shown(tuple(action))})


def misnumbered(facts: Facts) -> Iterator[Offence]:
    """Placements on ranks that do not exist."""
    ranks = range(facts.schedule.num_ranks)
    for stage, rank in enumerate(facts.schedule.placement):
        if rank not in ranks:
            yield Offence([], {"stage": stage, "rank": rank, "last": len(ranks) - 1})


def with_peer(facts: Facts) -> Iterator[Offence]:
    for cell, action in facts.all_cells():
        if action.peer != NO_PEER:
            yield Offence([cell], {"action": action, "peer": action.peer})


def not_of_kind(facts: Facts) -> Iterator[Offence]:
    for cell, action in facts.all_cells():
        if type(action.kind) is not Kind:
            yield Offence([cell], {"action": action, "kind": action.kind})


def not_compute(facts: Facts) -> Iterator[Offence]:
    for cell, action in facts.all_cells():
        if not is_scheduled(action):
            yield Offence([cell], {"action": action})


def out_of_range(facts: Facts) -> Iterator[Offence]:
    num_stages = facts.schedule.num_stages
    for cell, action in facts.all_cells():
        is_step = action.kind is Kind.STEP
        is_known = action.microbatch == WHOLE_BATCH if is_step else action.microbatch >= 0
        if not 0 <= action.stage < num_stages or not is_known or action.version < NO_VERSION:
            yield Offence([cell], {"action": action, "last": num_stages - 1})


def without_stage(facts: Facts) -> Iterator[Offence]:
    for rank in range(facts.schedule.num_ranks):
        if not facts.schedule.stages_of(rank):
            yield Offence([], {"rank": rank})


def misreplicated(facts: Facts) -> Iterator[Offence]:
    """Ranks of a replicated stage hold no other; and there is a number for each stage."""
    placement, replicas = facts.schedule.placement, facts.schedule.replicas
    are_sizes = all(type(count) is int and count > 0 for count in replicas)
    if replicas and (not are_sizes or placement != side_by_side(replicas)):
        yield Offence([], {"replicas": list(replicas), "placement": list(placement)})


def misplaced(facts: Facts) -> Iterator[Offence]:
    home, placement = facts.schedule.home, facts.schedule.placement
    replicas = facts.schedule.replicas
    for cell, action in facts.all_cells():
        is_step = action.kind is Kind.STEP
        if is_step and cell[0] in ranks_of(placement, replicas, action.stage):
            continue
        rank = home(action.stage, 0 if is_step else action.microbatch)
        if rank != cell[0]:
            yield Offence([cell], {"action": action, "rank": cell[0], "home": rank})


def repeated(facts: Facts) -> Iterator[Offence]:
    num_actions = sum(map(len, facts.schedule.actions))
    if num_actions == sum(map(len, facts.cells.values())):
        return
    seen: dict[Action, Cell] = {}
    for cell, action in facts.all_cells():
        if action.kind is Kind.STEP:
            continue  # once on each rank that holds the stage
        action = action._replace(version=NO_VERSION)  # noqa: PLW2901  whatever weights it uses
        if seen.setdefault(action, cell) is not cell:
            yield Offence([seen[action], cell], {"action": action})


def whole_and_halves(facts: Facts) -> Iterator[Offence]:
    for half in (Kind.I, Kind.W):
        for place in facts.cells[Kind.B].keys() & facts.cells[half].keys():
            cells = [facts.cells[kind][place] for kind in (Kind.B, half)]
            words = {"whole": facts.action(Kind.B, place), "half": facts.action(half, place)}
            yield Offence(cells, words)


def missing(*kinds: Kind) -> Callable[[Facts], Iterator[Offence]]:
    """Places where none of these kinds runs; at most one of them does, by the rule above."""

    def find(facts: Facts) -> Iterator[Offence]:
        tables = [facts.cells[kind] for kind in kinds]
        if sum(map(len, tables)) == facts.num_places:
            return
        for place in range(facts.num_places):
            if not any(place in table for table in tables):
                yield _gap(facts, kinds[0], place)

    return find


def _gap(facts: Facts, kind: Kind, place: int) -> Offence:
    """Marked is the last thing that does happen to the micro-batch on its stage.

    If nothing does, it is the action that makes us expect so many micro-batches: a stray number in
    a file looks like one micro-batch more, which is then missing everywhere else.
    """
    cells = [table[place] for table in facts.cells.values() if place in table]
    last = facts.schedule.total_microbatches - 1
    witness = next(cell for cell, action in facts.all_cells() if action.microbatch == last)
    words = {"action": facts.action(kind, place), "whole": facts.action(Kind.B, place)}
    words["witness"] = facts.schedule.actions[witness[0]][witness[1]]
    return Offence([max(cells)] if cells else [witness], words)


def before(first: Kind, second: Kind) -> Callable[[Facts], Iterator[Offence]]:
    """Places where the second runs although the first has not run."""

    def find(facts: Facts) -> Iterator[Offence]:
        needed = facts.cells[first]
        for place, cell in facts.cells[second].items():
            if needed[place] > cell:
                words = {"early": facts.action(second, place), "late": facts.action(first, place)}
                yield Offence([cell, needed[place]], words)

    return find


def without_share(facts: Facts) -> Iterator[Offence]:
    """A replica with no gradient in some mini-batch has none to reduce, and others wait for it."""
    num_microbatches = facts.schedule.num_microbatches
    for stage, count in enumerate(facts.schedule.replicas):
        if num_microbatches % count:
            yield Offence([], {"total": num_microbatches, "count": count, "stage": stage})


def deadlocked(facts: Facts) -> Iterator[Offence]:
    schedule = facts.schedule
    if schedule.replicas:  # whose steps wait for each other
        program = lowered(schedule)
        yield from _marked_in(schedule, program.actions, deadlocked_program(ProgramFacts(program)))
        return
    rows = [[a for a in row if a.kind in COMPUTE] for row in schedule.actions]
    numbering = Numbering(schedule.num_stages, schedule.total_microbatches)
    lanes = [numbering.lane(row) for row in rows]
    waits = waits_of(numbering, chain(schedule.num_stages), lambda *_: 0.0)
    run = run_lanes(lanes, [1.0] * numbering.num_tasks, waits)
    yield from _marked_in(schedule, rows, waiting_for_each_other(rows, lanes, waits, run))


def _marked_in(
    schedule: Schedule, rows: Sequence[Sequence[Action]], offences: Iterator[Offence]
) -> Iterator[Offence]:
    """Cells of other rows with the same actions, as cells of the schedule."""
    for cells, words in offences:
        found = [(rank, schedule.actions[rank].index(rows[rank][i])) for rank, i in cells]
        yield Offence(found, words)


NEEDED = "{early} comes before {late}, which it needs: swap them"
RULES = (
    Rule("something to do", empty, "{num_ranks} ranks have nothing to do: is this a schedule?"),
    Rule("kinds", not_of_kind, "{action} has {kind!r} for its kind: use one of sl.Kind"),
    Rule(
        "whole numbers",
        not_numbers,
        "{action} is an action, but its stage, micro-batch, peer and version have to be whole "
        "numbers: build it as sl.Action(2, sl.Kind.F, 0)",
    ),
    Rule(
        "known ranks",
        misnumbered,
        "stage {stage} is placed on rank {rank}, but ranks go from 0 to {last}: place it on one of "
        "them",
    ),
    Rule(
        "only compute",
        not_compute,
        "{action} does not compute, but a schedule holds only F, I, W and B: leave it to lower()",
    ),
    Rule(
        "no peers",
        with_peer,
        "{action} has stage {peer} as its peer, but only sends and receives have one: leave it out",
    ),
    Rule(
        "known stages and micro-batches",
        out_of_range,
        "{action} is out of range, but stages go from 0 to {last}, and micro-batches and versions "
        "from 0 up",
    ),
    Rule(
        "replicas side by side",
        misreplicated,
        "stages with {replicas} replicas are placed on ranks {placement} on, but ranks hold one "
        "stage each, in the order of stages: place them so",
    ),
    Rule(
        "every rank holds a stage",
        without_stage,
        "rank {rank} holds no stage: place one there, or use fewer ranks",
    ),
    Rule(
        "on its own rank",
        misplaced,
        "{action} stands on rank {rank}, but its stage is placed on rank {home}: move it there",
    ),
    Rule("once", repeated, "{action} runs more than once: keep one of them"),
    Rule(
        "whole or in halves",
        whole_and_halves,
        "{whole} and {half} both run, but B is I and W in one: keep B, or I with W",
    ),
    Rule(
        "every forward",
        missing(Kind.F),
        "{action} is missing, but with {witness} every stage has as many micro-batches: add it",
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
    Rule("input before weights", before(Kind.I, Kind.W), NEEDED),
    Rule(
        "a share for every replica",
        without_share,
        "a mini-batch of {total} does not go round among the {count} ranks of stage {stage}: use a "
        "multiple of {count} micro-batches, or other replicas",
    ),
)
DEADLOCK = (Rule("no deadlock", deadlocked, "{who}: {cycle}: change the order of one of them"),)
