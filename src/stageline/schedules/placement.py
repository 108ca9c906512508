"""Which rank holds which stage: `placement[stage]` is a rank.

straight   0 1 2 3                one stage a rank
loop       0 1 2 3 0 1 2 3        interleaved: rank r holds r, r+p, r+2p …
wave       0 1 2 3 3 2 1 0        rank r holds r and 2p-1-r; with two chunks this is the V
"""

Placement = tuple[int, ...]


def loop(num_ranks: int, chunks_per_rank: int = 1) -> Placement:
    return tuple(range(num_ranks)) * chunks_per_rank


def wave(num_ranks: int, chunks_per_rank: int = 2) -> Placement:
    down = tuple(range(num_ranks))
    return tuple(
        rank for chunk in range(chunks_per_rank) for rank in (down[::-1] if chunk % 2 else down)
    )


def stages_on(placement: Placement, rank: int) -> tuple[int, ...]:
    """The stages that a rank holds, ascending."""
    return tuple(stage for stage, home in enumerate(placement) if home == rank)
