"""Let a fault strike one rank of three, and see how the others end.

The time is taken at the very end of a program, before the interpreter takes itself apart: with
torch that took 3 to 4 s on a machine that was busy with other things.
"""

from __future__ import annotations

import signal
from pathlib import Path
from time import monotonic
from typing import NamedTuple

from tests.distributed.fork_servers import LOOPBACK, ranks
from tests.distributed.workers.faults import START_UP, TIMEOUT

NUM_RANKS = 3
SLACK = 5.0  # seconds beyond the limit
LONGEST = 90.0  # seconds until a process that does not end is killed


class Outcome(NamedTuple):
    """How the ranks ended."""

    seconds: float  # from the fault to the end of the last of the others
    outputs: list[str]
    problem: str | None

    @property
    def cell(self) -> str:
        return f"{self.seconds:.1f} s" + (" (!)" if self.problem else "")


def strike(place: str, kind: str, culprit: int, folder: Path) -> Outcome:
    """Return how the ranks end: all but one that is stopped have to, and to name the culprit."""
    arguments = (place, kind, str(culprit), str(folder))
    with ranks("faults", NUM_RANKS, *arguments, folder=folder, environment=LOOPBACK) as processes:
        end = monotonic() + LONGEST
        for rank, process in enumerate(processes):
            if kind != "SIGSTOP" or rank != culprit:
                process.wait(end - monotonic())
    codes = [process.code for process in processes]
    others = [rank for rank in range(NUM_RANKS) if rank != culprit]
    seconds = max(_time(folder / f"ended-{rank}") for rank in others) - _time(folder / "struck")
    outputs = [process.output for process in processes]
    return Outcome(seconds, outputs, _problem(place, kind, culprit, codes, seconds, outputs))


def _time(path: Path) -> float:
    return float(path.read_text()) if path.exists() else float("nan")


def _problem(
    place: str,
    kind: str,
    culprit: int,
    codes: list[int | None],
    seconds: float,
    outputs: list[str],
) -> str | None:
    """What is wrong, if anything."""
    limit = START_UP if "before the pipeline" in place else TIMEOUT
    if any(code == -signal.SIGKILL for rank, code in enumerate(codes) if rank != culprit):
        return f"a rank did not end; exit codes {codes}\n{''.join(o[-600:] for o in outputs)}"
    if not seconds <= limit + SLACK:
        return f"it took {seconds:.1f} s; exit codes {codes}\n{''.join(o[-600:] for o in outputs)}"
    for rank, (code, output) in enumerate(zip(codes, outputs, strict=True)):
        error = output.rpartition("stageline.errors.")[2]
        if rank != culprit and (code != 1 or f"rank {culprit}" not in error):
            return f"rank {rank} ended with {code}, and does not name the culprit:\n{output}"
        is_told = kind == "raise" and "before the pipeline" not in place  # there is no way yet
        if rank != culprit and is_told and "a fault of the user's own" not in error:
            return f"rank {rank} does not say why:\n{output}"
    return None
