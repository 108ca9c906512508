"""Start a worker script as the processes of one group, and never leave one behind."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import NamedTuple

from tests.distributed.fork_servers import ranks

TIMEOUT = 100.0  # seconds; less than a test has, so that it can show what the ranks were doing
AFTERMATH = 8.0  # seconds in which all have to end, once one has failed
KILLED = 10.0  # seconds in which a process that is killed is gone


class Ended(NamedTuple):
    """How one process ended."""

    code: int | None
    output: str
    seconds: float  # from the start of all of them


def launch(
    worker: str,
    num_ranks: int,
    *arguments: str,
    timeout: float = TIMEOUT,
    stopped: Collection[int] = (),
) -> list[Ended]:
    """Return how each rank ended; those that have not when the time is over are killed.

    The output of one that was killed ends with the stacks of its threads.

    Ranks that are `stopped` never end by themselves: they are killed when all others have ended.
    """
    start = monotonic()
    with (
        TemporaryDirectory() as folder,
        ranks(worker, num_ranks, *arguments, folder=Path(folder)) as processes,
    ):
        ends: dict[int, Ended] = {}
        for rank in sorted(range(num_ranks), key=lambda rank: rank in stopped):
            process = processes[rank]
            code = process.wait(0.0 if rank in stopped else start + timeout - monotonic())
            if code is None:
                if rank not in stopped:
                    process.print_stacks()
                process.kill()
                code = process.wait(KILLED)
            ends[rank] = Ended(code, process.output, monotonic() - start)
            if code:  # the others should soon follow
                timeout = min(timeout, ends[rank].seconds + AFTERMATH)
        return [ends[rank] for rank in range(num_ranks)]
