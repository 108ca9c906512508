"""Let a fault strike one rank of three, and see how the others end.

The time is taken at the very end of a program, before the interpreter takes itself apart: with
torch that takes 0.3 s on a machine at rest, and several on a busy one.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from time import monotonic, sleep
from typing import NamedTuple

from tests.distributed.launch import WORKERS, free_port
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
    """The one that is stopped does not end; all others have to, and to name it."""
    start, port = monotonic(), str(free_port())
    processes: list[subprocess.Popen[bytes]] = []
    logs = [folder / f"output-{rank}" for rank in range(NUM_RANKS)]
    try:
        for rank, log in enumerate(logs):
            own = {"RANK": str(rank), "WORLD_SIZE": str(NUM_RANKS), "MASTER_PORT": port}
            own |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
            own |= {"PYTHONWARNINGS": "ignore:the rendezvous store listens"}
            command = [sys.executable, str(WORKERS / "faults.py"), place, kind, str(culprit)]
            with log.open("wb") as output:
                processes.append(
                    subprocess.Popen(
                        [*command, str(folder)],
                        env=os.environ | own,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        others = [rank for rank in range(NUM_RANKS) if rank != culprit]
        awaited = [p for r, p in enumerate(processes) if r in others or kind != "SIGSTOP"]
        while any(p.poll() is None for p in awaited) and monotonic() < start + LONGEST:
            sleep(0.05)
        codes = [process.poll() for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    struck = _time(folder / "struck")
    seconds = max(_time(folder / f"ended-{rank}") for rank in others) - struck
    outputs = [log.read_text() for log in logs]
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
    if any(code is None for rank, code in enumerate(codes) if rank != culprit):
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
