"""Kill processes of a run under torchrun at random points, and let it start them again."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from time import monotonic

from tests.distributed.launch import WORKERS

TIMEOUT = 60.0  # seconds until a process that was killed has a successor


def start(folder: Path, steps: int, num_ranks: int, max_restarts: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={num_ranks}", f"--max-restarts={max_restarts}"]
    return subprocess.Popen(
        [*command, str(WORKERS / "fitting.py"), str(folder), str(steps)],
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def train_through(
    folder: Path, steps: int, *, kills: int, num_ranks: int = 2, longest: float = 8.0, seed: int = 0
) -> Iterator[tuple[int, float]]:
    """Gives the rank of each process that was killed, and how old it was; raises if training fails.

    A process may be killed when it starts, loads, trains or saves.
    """
    chance = random.Random(seed)
    run = start(folder, steps, num_ranks, kills)
    with run:
        try:
            for attempt in range(kills):
                rank, age = chance.randrange(num_ranks), chance.uniform(0, longest)
                process = _started(run, folder / f"pid-{attempt}-{rank}")
                _keep_running(run, age)
                os.kill(process, signal.SIGKILL)
                yield rank, age
            output, _ = run.communicate(timeout=300)
            assert run.returncode == 0, output
        finally:
            if run.poll() is None:
                run.terminate()  # torchrun ends its processes, which have groups of their own
                run.wait(60)


def _keep_running(run: subprocess.Popen[str], seconds: float) -> None:
    with suppress(subprocess.TimeoutExpired):
        run.wait(seconds)
        raise AssertionError(f"training ended before a kill: {run.communicate()[0]}")


def _started(run: subprocess.Popen[str], path: Path) -> int:
    """A process that says so."""
    end = monotonic() + TIMEOUT
    while monotonic() < end:
        _keep_running(run, 0.05)
        if path.exists() and (text := path.read_text()):
            return int(text)
    raise AssertionError("no process was started again")
