"""Define the rules of channels, which run operations in the order in which they are issued."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import chain, pairwise

from stageline.schedules.marked_grid import Cell
from stageline.schedules.program.channel_tasks import (
    OF_ALL_RANKS,
    Channels,
    ChannelTasks,
    channel_tasks,
)
from stageline.schedules.rules.program_rules import ProgramFacts
from stageline.schedules.rules.rule import (
    Rule,
    Violation,
    circular_wait,
    cycle_from,
    missing_task,
)
from stageline.schedules.task_graph import LaneTimes, run_lanes


def absent_ranks(facts: ProgramFacts) -> Iterator[Violation]:
    """Yield collectives of all ranks that some rank does not take part in."""
    program = facts.program
    counts = [
        Counter((a.kind, a.version) for a in row if a.kind in OF_ALL_RANKS)
        for row in program.actions
    ]
    for kind, version in dict.fromkeys(chain.from_iterable(counts)):
        numbers = [count[kind, version] for count in counts]
        if len(set(numbers)) > 1:
            most, least = numbers.index(max(numbers)), numbers.index(min(numbers))
            row = program.actions[most]
            *_, last = (i for i, a in enumerate(row) if (a.kind, a.version) == (kind, version))
            values = {"action": row[last], "most": most, "least": least}
            values |= {"number": max(numbers), "fewer": min(numbers)}
            yield Violation([(most, last)], values)


def deadlocked_on_channels(facts: ProgramFacts, channels: Channels) -> Iterator[Violation]:
    """Yield the cycle of a program that does not complete on channels that keep their order.

    One run is a proof: what each rank and each channel does next is fixed, so how far they come
    does not depend on how long anything takes.
    """
    tasks = channel_tasks(facts.program, channels)
    run = run_lanes(tasks.lanes, [1.0] * len(tasks.dependencies.rows), tasks.dependencies)
    if not run.is_complete(tasks.lanes):
        yield _circular_wait(facts, tasks, run)


def _circular_wait(facts: ProgramFacts, tasks: ChannelTasks, run: LaneTimes) -> Violation:
    rows, num_ranks = facts.program.actions, len(facts.program.actions)
    cells: list[Cell] = [(rank, i) for rank, row in enumerate(rows) for i in range(len(row))]
    lane_of = {task: lane for lane, queue in enumerate(tasks.lanes) for task in queue}

    def head(lane: int) -> Cell:
        return cell_of(tasks.lanes[lane][run.progress[lane]])

    def cell_of(task: int) -> Cell:
        return cells[tasks.action_of(task)]

    def wait_of(lane: int) -> tuple[Cell, int]:
        """Return what a lane waits for, and the lane in which that is held up."""
        task = missing_task(tasks.lanes[lane][run.progress[lane]], tasks.dependencies, run)
        if tasks.is_meeting(task):
            task = missing_task(task, tasks.dependencies, run)
        awaited, other = cell_of(task), lane_of[task]
        if other < num_ranks or head(other) != awaited:
            return awaited, other
        rank = awaited[0]
        return wait_of(other) if rank == head(lane)[0] else (awaited, rank)

    def name(cell: Cell) -> str:
        rank, position = cell
        action = rows[rank][position]
        is_on_several = len(facts.ranks_of(action)) > 1
        return f"rank {rank}'s {action}" if is_on_several else str(action)

    stuck = next(n for n, queue in enumerate(tasks.lanes) if run.progress[n] < len(queue))
    cycle = cycle_from(stuck, lambda lane: wait_of(lane)[1])
    steps, channels = [], []
    for lane in cycle:
        awaited, other = wait_of(lane)
        behind = f" behind {name(head(other))}" if other >= num_ranks else ""
        channels.append(tasks.channels[other - num_ranks] if behind else "")
        steps.append(f"{name(head(lane))} for {name(awaited)}{behind}")
    for i, (channel, following) in enumerate(pairwise([*channels, ""])):
        steps[i] += f" on {channel}" if channel != following else ""
    return circular_wait([*map(head, cycle)], steps)


def deadlocked_on_directed_channels(facts: ProgramFacts) -> Iterator[Violation]:
    return deadlocked_on_channels(facts, "directed")


def deadlocked_on_shared_channels(facts: ProgramFacts) -> Iterator[Violation]:
    return deadlocked_on_channels(facts, "shared")


CHANNEL_RULES: dict[Channels, tuple[Rule[ProgramFacts], ...]] = {
    "directed": (
        Rule(
            "all ranks in every collective",
            absent_ranks,
            "{action} is number {number} of its kind on rank {most}, but all ranks take part and "
            "rank {least} has {fewer}: place as many stages on every rank",
        ),
        Rule(
            "no deadlock, ordered channels",
            deadlocked_on_directed_channels,
            "{who} on ordered channels: {cycle}: change the order of one of them",
        ),
    ),
    "shared": (
        Rule(
            "no deadlock, channels shared by both directions",
            deadlocked_on_shared_channels,
            "{who} if both directions share a channel: {cycle}: use a channel for each direction, "
            "or change the order of one of them",
        ),
    ),
}
