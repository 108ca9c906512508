"""Kill processes of a run at random points, and let them be started again: by torchrun or by forks.

Forks start in milliseconds, so that hundreds of kills take minutes.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from time import monotonic, sleep
from typing import IO

from tests.distributed.fork_servers import LOOPBACK, WORKERS, RankProcess, ranks

import stageline as sl

# Else processes that torchrun starts again may read the addresses of those before them, which are
# gone (pytorch/pytorch#135712, #167288).
FRESH_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
TIMEOUT = 60.0  # seconds until a process that was killed has a successor
LAST = 240.0  # seconds until training is over, after the last kill
ENDLESS = 10**9  # steps that no run reaches before it is killed
MORE = 40  # steps after the last kill


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


def train_through_forks(
    folder: Path, *, kills: int, num_ranks: int = 2, longest: float = 2.0, seed: int = 0
) -> Iterator[int]:
    """Gives the step of the newest checkpoint after each kill, which must never go back.

    Who is left after a kill is killed too, a moment later, as torchrun would. At the end training
    goes on for some more steps.
    """
    chance = random.Random(seed)
    folder.mkdir(parents=True)
    for attempt in range(kills):
        with _training(folder, ENDLESS, num_ranks, attempt) as processes:
            sleep(chance.uniform(0, longest))
            chance.choice(processes).kill()
            sleep(chance.uniform(0, 0.3))
        assert -signal.SIGKILL in [process.code for process in processes]
        yield newest_step(folder)
    _train(folder, newest_step(folder) + MORE, num_ranks, kills)


def train_undisturbed(folder: Path, steps: int, num_ranks: int = 2) -> None:
    """Train to the end, in processes that nobody kills."""
    folder.mkdir(parents=True)
    _train(folder, steps, num_ranks, 0)


def _train(folder: Path, steps: int, num_ranks: int, attempt: int) -> None:
    with _training(folder, steps, num_ranks, attempt) as processes:
        codes = [process.wait(LAST) for process in processes]
    assert codes == [0] * num_ranks, (codes, processes[0].output[-3000:])


def _training(
    folder: Path, steps: int, num_ranks: int, attempt: int
) -> AbstractContextManager[list[RankProcess]]:
    environment = LOOPBACK | {"TORCHELASTIC_RESTART_COUNT": str(attempt)}
    arguments = (str(folder), str(steps))
    return ranks("fitting", num_ranks, *arguments, folder=folder, environment=environment)


def newest_step(folder: Path) -> int:
    found = sl.latest(folder)
    return 0 if found is None else int(found.name.removeprefix("step-"))


def _start(
    folder: Path, steps: int, num_ranks: int, max_restarts: int, output: IO[str]
) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={num_ranks}", f"--max-restarts={max_restarts}"]
    return subprocess.Popen(
        [*command, str(WORKERS / "fitting.py"), str(folder), str(steps)],
        env=os.environ | LOOPBACK | {"OMP_NUM_THREADS": "1", FRESH_STORE: "1"},
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
