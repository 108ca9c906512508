"""Kill processes of a run under torchrun at random points, and let it start them again."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from typing import IO

from tests.distributed.launch import WORKERS

# Else processes that torchrun starts again may read the addresses of those before them, which are
# gone (pytorch/pytorch#135712, #167288).
FRESH_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
TIMEOUT = 60.0  # seconds until a process that was killed has a successor
LAST = 240.0  # seconds until training is over, after the last kill


def train_through(
    folder: Path, steps: int, *, kills: int, num_ranks: int = 2, longest: float = 8.0, seed: int = 0
) -> Iterator[tuple[int, float]]:
    """Gives the rank of each process that was killed, and how old it was; raises if training fails.

    A process may be killed when it starts, loads, trains or saves.
    """
    chance = random.Random(seed)
    folder.mkdir(parents=True)
    log = folder / "output"
    with log.open("w") as output, _start(folder, steps, num_ranks, kills, output) as run:
        try:
            for attempt in range(kills):
                rank, age = chance.randrange(num_ranks), chance.uniform(0, longest)
                process = _started(run, folder / f"pid-{attempt}-{rank}")
                assert not _ends_within(run, age), log.read_text()
                os.kill(process, signal.SIGKILL)
                yield rank, age
            assert _ends_within(run, LAST), log.read_text()
            assert run.returncode == 0, log.read_text()
        finally:
            if run.poll() is None:
                run.terminate()  # torchrun ends its processes, which have groups of their own
                run.wait(60)


def _start(
    folder: Path, steps: int, num_ranks: int, max_restarts: int, output: IO[str]
) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={num_ranks}", f"--max-restarts={max_restarts}"]
    return subprocess.Popen(
        [*command, str(WORKERS / "fitting.py"), str(folder), str(steps)],
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", FRESH_STORE: "1"},
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def _started(run: subprocess.Popen[str], path: Path) -> int:
    """A process that says so."""
    end = monotonic() + TIMEOUT
    while monotonic() < end and not _ends_within(run, 0.05):
        if path.exists() and (text := path.read_text()):
            return int(text)
    raise AssertionError("no process was started again")


def _ends_within(run: subprocess.Popen[str], seconds: float) -> bool:
    try:
        run.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True
