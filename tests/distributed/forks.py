"""Many groups of processes of one worker, one after another, without importing torch each time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.distributed.launch import WORKERS, free_port

ROOT = WORKERS.parents[2]


class Forks:
    """A process that forks ranks of a worker; see `workers/forked.py`. State: that process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def start(self, num_ranks: int, log: Path, *arguments: str) -> list[int]:
        """The numbers of new processes."""
        assert self.process.stdin is not None
        sizes = {"num_ranks": num_ranks, "port": free_port()}
        request = sizes | {"arguments": arguments, "log": str(log)}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def codes(self) -> list[int]:
        """How all of them have ended, when they have."""
        return self._answer()

    def _answer(self) -> list[int]:
        assert self.process.stdout is not None
        return [int(word) for word in self.process.stdout.readline().split()]


@contextmanager
def forks(worker: str) -> Iterator[Forks]:
    """Nothing is left behind at the end."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    own = {"PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    own |= {"PYTHONWARNINGS": "ignore:the rendezvous store listens"}
    with subprocess.Popen(
        [sys.executable, str(WORKERS / "forked.py"), worker],
        env=os.environ | own,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield Forks(process)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
