"""Place stages on ranks: `placement[stage]` is a rank.

straight   0 1 2 3                one stage a rank
loop       0 1 2 3 0 1 2 3        interleaved: rank r holds r, r+p, r+2p …
wave       0 1 2 3 3 2 1 0        rank r holds r and 2p-1-r; with two chunks this is the V

replicated 0 3 with replicas 3 1  stage 0 on ranks 0, 1 and 2, with micro-batches in turn
"""

from collections.abc import Sequence
from itertools import accumulate

Placement = tuple[int, ...]
Replicas = tuple[int, ...]  # how many ranks hold each stage; () means one each


def loop(num_ranks: int, chunks_per_rank: int = 1) -> Placement:
    """Return the placement in which rank r holds stages r, r+p, r+2p, …"""
    return tuple(range(num_ranks)) * chunks_per_rank


def wave(num_ranks: int, chunks_per_rank: int = 2) -> Placement:
    """Return the placement that runs down the ranks and up again, once for every two chunks."""
    down = tuple(range(num_ranks))
    return tuple(
        rank for chunk in range(chunks_per_rank) for rank in (down[::-1] if chunk % 2 else down)
    )


def side_by_side(replicas: Sequence[int]) -> Placement:
    """Return the first rank of each stage, for stages with these numbers of replicas.

    >>> side_by_side([3, 1])
    (0, 3)
    """
    return tuple(accumulate(replicas[:-1], initial=0))


def rank_of(placement: Placement, replicas: Replicas, stage: int, microbatch: int) -> int:
    """Return the rank of a micro-batch: micro-batch i runs on replica i mod r of its stage."""
    return placement[stage] + (microbatch % replicas[stage] if replicas else 0)


def ranks_of(placement: Placement, replicas: Replicas, stage: int) -> range:
    """Return the ranks that hold a stage."""
    return range(placement[stage], placement[stage] + (replicas[stage] if replicas else 1))


def stages_by_rank(
    placement: Placement, num_ranks: int, replicas: Replicas = ()
) -> list[tuple[int, ...]]:
    """Return the stages that each rank holds, ascending.

    >>> stages_by_rank((0, 1, 1, 0), 2)
    [(0, 3), (1, 2)]
    """
    found: list[list[int]] = [[] for _ in range(num_ranks)]
    for stage in range(len(placement)):
        for rank in ranks_of(placement, replicas, stage):
            if 0 <= rank < num_ranks:
                found[rank].append(stage)
    return [tuple(stages) for stages in found]
