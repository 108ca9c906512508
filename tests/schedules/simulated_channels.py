"""Channels that run their operations in order, simulated without times: what is next is random."""

from collections import Counter
from collections.abc import Iterator
from random import Random
from typing import NamedTuple

from stageline.schedules.action import COMPUTE, Kind
from stageline.schedules.program.program import RECEIVE_KIND, Program, receive_of

RECEIVES = tuple(RECEIVE_KIND.values())


class Issue(NamedTuple):
    """A rank puts an operation on a channel, and goes on."""

    channel: object
    meeting: object  # the operations with this name complete together
    parties: int = 2  # how many ranks issue one
    is_receive: bool = False


class Wait(NamedTuple):
    """A rank waits until an operation that it has issued is complete."""

    meeting: object


Steps = list[list[Issue | Wait]]  # of each rank


def completes(rows: Steps, rng: Random, *, ordered: bool = True) -> bool:
    """Let ranks and channels move one at a time, in random order, for as long as any can."""
    issued = (step for row in rows for step in row if isinstance(step, Issue))
    parties = {step.meeting: step.parties for step in issued}
    position = [0] * len(rows)
    queues: dict[tuple[int, object], list[object]] = {}
    done: set[object] = set()
    while True:
        ready = Counter(
            meeting for queue in queues.values() for meeting in (queue[:1] if ordered else queue)
        )
        met = [meeting for meeting, number in ready.items() if number == parties[meeting]]
        heads = {
            rank: row[i]
            for rank, (row, i) in enumerate(zip(rows, position, strict=True))
            if i < len(row)
        }
        free = [
            rank for rank, step in heads.items() if isinstance(step, Issue) or step.meeting in done
        ]
        if not met and not free:
            return position == [*map(len, rows)] and not any(queues.values())
        move = rng.randrange(len(met) + len(free))
        if move < len(met):
            done.add(met[move])
            for queue in queues.values():
                if met[move] in queue:
                    queue.remove(met[move])
        else:
            rank = free[move - len(met)]
            step = heads[rank]
            position[rank] += 1
            if isinstance(step, Issue):
                queues.setdefault((rank, step.channel), []).append(step.meeting)


def steps_of(program: Program, *, shared: bool = False) -> Steps:
    """Return what each rank asks of its channels, and what it waits for."""
    return [[*_steps(program, rank, shared=shared)] for rank in range(len(program.actions))]


def _steps(program: Program, rank: int, *, shared: bool) -> Iterator[Issue | Wait]:
    sums: dict[int, object] = {}
    num_ranks, replicas = len(program.actions), program.replicas
    for action in program.actions[rank]:
        stage, kind, microbatch, peer, version = action
        if kind in RECEIVE_KIND or kind in RECEIVES:
            other = program.routes.rank_of(peer, microbatch)
            ends = (rank, other) if kind in RECEIVE_KIND else (other, rank)
            meeting = receive_of(action) if kind in RECEIVE_KIND else action
            channel = frozenset(ends) if shared else ends
            yield Issue(channel, meeting, is_receive=kind in RECEIVES)
        elif kind in COMPUTE:
            yield from (Wait(receive_of(send)) for send in program.routes.awaited(action))
        elif kind is Kind.REDUCE_GRAD:
            sums[stage] = stage, kind, version
            yield Issue("replicas", sums[stage], replicas[stage] if replicas else 1)
        elif kind is Kind.STEP:
            yield Wait(sums.pop(stage))
        else:
            name: object = (kind, version)
            if kind is Kind.CLIP_GRAD:
                yield from map(Wait, sums.values())
            if kind is Kind.UPDATE_STATS:
                name = (stage, kind, version)
                yield Issue("replicas", name, replicas[stage] if replicas else 1)
            else:
                yield Issue("all", name, num_ranks)
            yield Wait(name)
