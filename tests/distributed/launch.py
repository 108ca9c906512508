"""Start a script as several processes of one group, and never leave one behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from time import monotonic
from typing import NamedTuple

AFTERMATH = 8.0  # seconds in which all have to end, once one has failed
WORKERS = Path(__file__).parent / "workers"


class Ended(NamedTuple):
    """How one process ended."""

    code: int
    output: str
    seconds: float  # from the start of all of them


def launch(
    worker: str,
    num_ranks: int,
    *arguments: str,
    timeout: float = 120.0,
    environment: Mapping[str, str] | None = None,
) -> list[Ended]:
    """By rank. Who has not ended when the time is over is killed.

    Hashes of text differ from rank to rank, as they do under torchrun, and always in the same way.
    """
    start = monotonic()
    port = str(free_port())
    processes = []
    try:
        for rank in range(num_ranks):
            own = {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "MASTER_PORT": port}
            own |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
            own |= {"PYTHONWARNINGS": "ignore:the rendezvous store listens"}
            own |= {"PYTHONHASHSEED": str(rank + 1)}
            processes.append(
                subprocess.Popen(
                    [sys.executable, str(WORKERS / f"{worker}.py"), *arguments],
                    env=os.environ | own | dict(environment or {}),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    start_new_session=True,
                )
            )
        ends = []
        for process in processes:
            ends.append(_ended(process, start, timeout))
            if ends[-1].code:  # the others should soon follow
                timeout = min(timeout, ends[-1].seconds + AFTERMATH)
        return ends
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _ended(process: subprocess.Popen[str], start: float, timeout: float) -> Ended:
    try:
        output, _ = process.communicate(timeout=max(0.1, start + timeout - monotonic()))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
    return Ended(process.returncode, output, monotonic() - start)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
