"""Represent a program whose messages and collectives are queued on channels, as numbered tasks.

A channel, such as an NCCL communicator, is a queue at each of its ends. An operation arrives at the
head of a queue when its rank has come to it and all operations before it are complete. It completes
when its counterparts have arrived at the other ends:

    row of rank 0      … 0F0 ─ 0SEND_F0 ─ 0F1 …
                             ╰─► arrives ─┬─► completes           0 → 1 at rank 0
                             ╭─► arrives ─┴─► completes ─╮        0 → 1 at rank 1
    row of rank 1      … 1RECV_F0 ─ … ───────────────── 1F0 …

A rank goes on without waiting for a message or a REDUCE_GRAD: the action that needs it waits. Other
collectives keep their rank waiting. Replicas of the whole pipeline carry out the same program, so
they wait for each other in a cycle only if the ranks of one pipeline do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, pairwise
from typing import Literal, NamedTuple

from stageline.schedules.action import COMPUTE, Kind
from stageline.schedules.program.program import RECEIVE_KIND, Program, receive_of
from stageline.schedules.task_graph import Dependencies

Channels = Literal["directed", "shared"]
Waits = tuple[tuple[int, float], ...]  # as in `Dependencies`
RECEIVES = tuple(RECEIVE_KIND.values())
OF_ALL_RANKS = (Kind.REDUCE_TIED, Kind.CLIP_GRAD)
OF_REPLICAS = (Kind.REDUCE_GRAD, Kind.UPDATE_STATS)
BLOCKING = (*OF_ALL_RANKS, Kind.UPDATE_STATS)


class QueuedOperation(NamedTuple):
    """What one rank does on a channel."""

    action: int  # its number, counted through the rows
    rank: int
    channel: str
    meeting: object  # equal for the operations that wait for each other


class ChannelTasks(NamedTuple):
    """The input of `run_lanes`.

    The first lanes are the ranks, with one task for each of their actions. Then follow the ends of
    channels, with two tasks for each operation: it arrives, and it completes. Then follow the
    meetings of more than two ranks, with one task each: without it the dependencies of p ranks
    would be p².
    """

    lanes: list[list[int]]
    channels: list[str]  # of each lane that is an end of one
    operations: list[QueuedOperation]
    arrivals: range  # the tasks of the operations that arrive; the next one is its completion
    dependencies: Dependencies

    def action_of(self, task: int) -> int:
        """Return the number of the action that a task of a rank or channel belongs to."""
        behind = task - self.arrivals.start
        return task if behind < 0 else self.operations[behind // 2].action

    def is_meeting(self, task: int) -> bool:
        return task >= self.arrivals.stop


def channel_tasks(program: Program, channels: Channels) -> ChannelTasks:
    """Return the tasks of a program in which every action is present once on each of its ranks."""
    bounds = [*accumulate(map(len, program.actions), initial=0)]
    operations = [*_operations(program, bounds, channels)]
    arrivals = range(bounds[-1], bounds[-1] + 2 * len(operations), 2)
    queues: dict[tuple[int, str], list[int]] = {}
    meetings: dict[object, list[int]] = {}
    completions: dict[int, int] = {}  # by action
    for (action, rank, channel, meeting), arrival in zip(operations, arrivals, strict=True):
        queues.setdefault((rank, channel), []).extend((arrival, arrival + 1))
        meetings.setdefault(meeting, []).append(arrival)
        completions[action] = arrival + 1
    large = [ends for ends in meetings.values() if len(ends) > 2]
    waits: list[Waits] = [()] * (arrivals.stop + len(large))
    for task, others in _waits(program, bounds, completions):
        waits[task] = tuple([(other - task, 0.0) for other in others])
    for ends in meetings.values():
        if len(ends) == 2:
            first, second = ends
            waits[first + 1] = ((second - first - 1, 0.0),)
            waits[second + 1] = ((first - second - 1, 0.0),)
    for task, ends in enumerate(large, arrivals.stop):
        waits[task] = tuple([(end - task, 0.0) for end in ends])
        for end in ends:
            waits[end + 1] = ((task - end - 1, 0.0),)
    lanes = [[*range(first, end)] for first, end in pairwise(bounds)]
    return ChannelTasks(
        [*lanes, *queues.values(), *([task] for task in range(arrivals.stop, len(waits)))],
        [channel for _, channel in queues],
        operations,
        arrivals,
        Dependencies(1, waits),
    )


def _operations(
    program: Program, bounds: Sequence[int], channels: Channels
) -> Iterator[QueuedOperation]:
    """Yield the operations of all ranks, those of each rank in its order."""
    rank_of, name = program.routes.rank_of, _directed if channels == "directed" else _shared
    for rank, row in enumerate(program.actions):
        passed: Counter[tuple[Kind, int]] = Counter()
        for number, action in enumerate(row, bounds[rank]):
            stage, kind, microbatch, peer, version = action
            if kind in RECEIVE_KIND:
                channel = name(rank, rank_of(peer, microbatch))
                yield QueuedOperation(number, rank, channel, receive_of(action))
            elif kind in RECEIVES:
                channel = name(rank_of(peer, microbatch), rank)
                yield QueuedOperation(number, rank, channel, action)
            elif kind in OF_REPLICAS:
                yield QueuedOperation(
                    number, rank, "the channel of replicas", (stage, kind, version)
                )
            elif kind in OF_ALL_RANKS:  # a rank's first one meets the first one of every rank
                meeting = kind, version, passed[kind, version]
                yield QueuedOperation(number, rank, "the channel of all ranks", meeting)
                passed[kind, version] += 1


def _directed(source: int, target: int) -> str:
    return f"the channel from rank {source} to rank {target}"


def _shared(source: int, target: int) -> str:
    return f"the channel of ranks {min(source, target)} and {max(source, target)}"


def _waits(
    program: Program, bounds: Sequence[int], completions: dict[int, int]
) -> Iterator[tuple[int, list[int]]]:
    """Yield what actions and arrivals wait for, beside those before them on their lanes."""
    numbers = enumerate(chain.from_iterable(program.actions))
    received = {action: completions[n] for n, action in numbers if action.kind in RECEIVES}
    for first, row in zip(bounds, program.actions, strict=False):
        sums: dict[int, int] = {}  # the reductions that were started and not awaited, by stage
        for number, action in enumerate(row, first):
            kind = action.kind
            if number in completions:
                before = [number - 1] if number > first else []
                needed = sums.values() if kind is Kind.CLIP_GRAD else ()
                yield completions[number] - 1, [*before, *needed]
            if kind in COMPUTE:
                if messages := program.routes.awaited(action):
                    yield number, [received[receive_of(message)] for message in messages]
            elif kind in BLOCKING:
                yield number, [completions[number]]
            elif kind is Kind.REDUCE_GRAD:
                sums[action.stage] = completions[number]
            elif kind is Kind.STEP and action.stage in sums:
                yield number, [sums.pop(action.stage)]
