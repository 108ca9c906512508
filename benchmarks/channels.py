"""Are there deadlocks on channels that run their operations in order, as NCCL's communicators do?

python benchmarks/channels.py     prints the table, a few minutes; exits with 1 if there are

Every family is lowered for many sizes: with nothing but messages, and with all that ranks do
together (sums over tied weights, running statistics, clipping). Asynchronous families run as many
mini-batches as fill the pipeline, also with replicas of stages; all others one, and two without a
barrier. Sizes that a family does not take are left out.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from math import lcm
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import track
from rich.table import Table

import stageline as sl
from stageline.schedules.program.program import NO_EPILOGUE, Epilogue

RANKS = (2, 3, 4, 6, 8, 12, 16)
CHUNKS = {"interleaved_1f1b": (2, 3, 4), "looped_bfs": (2, 3, 4), "hanayo": (2, 4)}


class Case(NamedTuple):
    """The arguments of `build_schedule`."""

    name: str
    num_ranks: int
    num_microbatches: int
    options: dict[str, Any]


class Found(NamedTuple):
    """What was found out about one program."""

    num_ranks: int
    num_actions: int
    num_channels: int  # for messages, of the rank that has most
    error: str  # of channels for each direction
    deadlocks_if_shared: bool


def cases(name: str) -> Iterator[Case]:
    for p in RANKS:
        for options in variants(name, p):
            unit = lcm(*options.get("replicas", [p]))
            for m in (unit, 2 * unit, 2 * unit + 1, 4 * unit):
                yield Case(name, p, m, options)


def variants(name: str, num_ranks: int) -> Iterator[dict[str, Any]]:
    if name in sl.schedule_names(synchronous=False):
        half = num_ranks // 2
        yield {}
        counts = ((half, num_ranks - half), (num_ranks - 1, 1), (1, num_ranks - 1))
        yield from ({"replicas": replicas} for replicas in dict.fromkeys(counts))
        return
    for options in [{"chunks_per_rank": v} for v in CHUNKS.get(name, ())] or [{}]:
        yield options
        yield options | {"num_minibatches": 2}


def programs(case: Case) -> Iterator[sl.Program]:
    try:
        schedule = sl.build_schedule(
            case.name,
            num_ranks=case.num_ranks,
            num_microbatches=case.num_microbatches,
            **case.options,
        )
    except sl.ScheduleError:
        return  # the family does not take these sizes
    # ranks that hold several stages sum and clip once, behind a barrier, and not in a stream
    meets = not schedule.is_stream or schedule.num_stages <= schedule.num_ranks
    yield sl.lower(schedule, epilogue=Epilogue(meets, tuple(range(schedule.num_stages)), meets))
    if "num_minibatches" not in case.options:
        yield sl.lower(schedule, epilogue=NO_EPILOGUE)


def found_of(program: sl.Program) -> Found:
    error, deadlocks_if_shared = "", False
    try:
        sl.check(program)
    except sl.ScheduleError as refused:
        error = str(refused)
    try:
        sl.check(program, channels="shared")
    except sl.ScheduleError:
        deadlocks_if_shared = not error
    rows = program.actions
    num_channels = max(len(set(channels(program, rank))) for rank in range(len(rows)))
    return Found(len(rows), sum(map(len, rows)), num_channels, error, deadlocks_if_shared)


def channels(program: sl.Program, rank: int) -> Iterator[tuple[bool, int]]:
    """The channels for messages of a rank, by direction and other rank."""
    for action in program.actions[rank]:
        if action.kind.startswith(("SEND", "RECV")):
            other = program.routes.rank_of(action.peer, action.microbatch)
            yield action.kind.startswith("SEND"), other


def row(name: str, found: Iterable[Found]) -> list[str]:
    found = list(found)
    proven = {p: [not each.error for each in found if each.num_ranks == p] for p in RANKS}
    return [
        name,
        *(f"{sum(each)}/{len(each)}" for each in proven.values()),
        str(len(found)),
        str(sum(not each.error for each in found)),
        str(sum(each.deadlocks_if_shared for each in found)),
        str(max(each.num_channels for each in found)),
        f"{max(each.num_actions for each in found):,}",
    ]


def main() -> int:
    table = Table(title="proven without deadlock, of programs lowered", box=None)
    counts = ("programs", "proven", "deadlock if shared", "channels a rank", "most actions")
    for column in ("schedule", *(f"p = {p}" for p in RANKS), *counts):
        table.add_column(column, justify="left" if column == "schedule" else "right")
    work = [case for name in sl.schedule_names() for case in cases(name)]
    found: dict[str, list[Found]] = {name: [] for name in sl.schedule_names()}
    for case in track(work, "proving", transient=True):
        found[case.name].extend(map(found_of, programs(case)))
    for name, of_name in found.items():
        table.add_row(*row(name, of_name))
    everything = [each for of_name in found.values() for each in of_name]
    table.add_section()
    table.add_row(*row("all", everything))
    console = Console(width=150)
    console.print(table)
    errors = [each.error for each in everything if each.error]
    console.print("\n\n".join(errors), markup=False)
    return min(1, len(errors))


if __name__ == "__main__":
    sys.exit(main())
