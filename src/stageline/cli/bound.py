"""Bind this process to its share of the machine's cores, then run another program in its place.

    python -m stageline.cli.bound python train.py      as `stageline run` starts each process

Ranks that mostly wait, for accelerators or for each other, are not spread over cores by the kernel
of every machine: on a virtual one with two cores, two such ranks shared one for most of a step, and
1F1B with forwards of 1 ms took 32 ms instead of 30.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection


def cores_of(rank: int, num_ranks: int, available: Collection[int]) -> set[int]:
    """Return the cores of one rank: an equal share in a row, or all if there are not enough.

    >>> [cores_of(rank, 2, {0, 1, 2, 3, 4}) for rank in range(2)]
    [{0, 1}, {2, 3, 4}]
    >>> cores_of(0, 2, {7})
    {7}
    """
    cores = sorted(available)
    if len(cores) < num_ranks:
        return set(cores)
    first, stop = (len(cores) * number // num_ranks for number in (rank, rank + 1))
    return set(cores[first:stop])


def main() -> None:
    """Run the program in the arguments."""
    if hasattr(os, "sched_setaffinity"):  # Linux
        rank, num_ranks = (int(os.environ[name]) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
        os.sched_setaffinity(0, cores_of(rank, num_ranks, os.sched_getaffinity(0)))
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
