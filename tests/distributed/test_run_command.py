"""`stageline run`: a script as several processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from stageline.cli.bound import cores_of

SCRIPT = """
import sys
import torch, torch.distributed as dist
from torch import nn
import stageline as sl

dist.init_process_group("gloo")
pipe = sl.Pipeline(
    [nn.Linear(4, 4), nn.Linear(4, 4)], nn.functional.mse_loss, num_ranks=2, num_microbatches=2
)
loss = float(pipe.step(torch.ones(4, 4), torch.ones(4, 4)).loss)
print(f"rank {dist.get_rank()} with {sys.argv[1:]}: {loss:.4f}")
dist.destroy_process_group()
"""


def stageline(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from stageline.cli import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)


def test_a_script_runs_as_several_ranks(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    ended = stageline("run", "--num-processes", "2", str(script), "--lr", "0.1")
    assert ended.returncode == 0, ended.stderr
    losses = re.findall(r"with \['--lr', '0.1'\]: (\d\.\d{4})", ended.stdout)
    assert len(losses) == 2
    assert losses[0] == losses[1]


CORES = """
import os
print(f"rank {os.environ['RANK']}: {sorted(os.sched_getaffinity(0))}")
"""


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="Linux only")
def test_each_process_has_its_share_of_the_cores_if_there_is_one_for_each(tmp_path: Path) -> None:
    script = tmp_path / "cores.py"
    script.write_text(CORES)
    cores = sorted(os.sched_getaffinity(0))
    count = min(2, len(cores))
    ended = stageline("run", "--num-processes", str(count), str(script))
    shares = [cores_of(rank, count, cores) for rank in range(count)]
    assert set().union(*shares) == set(cores)
    assert sum(map(len, shares)) == len(cores)
    for rank, share in enumerate(shares):
        assert f"rank {rank}: {sorted(share)}" in ended.stdout
    ended = stageline("run", "--no-bind-cores", "--num-processes", str(count), str(script))
    assert ended.stdout.count(str(cores)) == count
    too_many = stageline("run", "--num-processes", str(len(cores) + 1), str(script))
    assert too_many.stdout.count(str(cores)) == len(cores) + 1


def test_a_script_that_fails_is_named(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit(3)")
    ended = stageline("run", "--num-processes", "2", str(script))
    assert ended.returncode == 2
    assert "train.py ended with exit code 3" in ended.stderr


def test_a_script_that_is_not_there_is_told(tmp_path: Path) -> None:
    ended = stageline("run", str(tmp_path / "nothing.py"))
    assert ended.returncode == 2
    assert "nothing.py does not exist, but has to be a Python script" in ended.stderr


WAITING = """
import os, signal, sys, time
if "--stubborn" in sys.argv:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
os.write(1, f"pid {os.getpid()}\\n".encode())  # print would be several writes, and ranks mix them
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_a_signal_ends_all_processes_and_says_one_line(
    number: signal.Signals, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(WAITING)
    command = [
        sys.executable,
        "-c",
        "from stageline.cli import main; main()",
        "run",
        "--num-processes",
        "2",
    ]
    process = subprocess.Popen(
        ["env", "--default-signal=INT", *command, str(script), "--stubborn"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    pids: list[int] = []
    try:
        assert process.stdout
        while len(pids) < 2:
            pids += [int(found) for found in re.findall(r"pid (\d+)", process.stdout.readline())]
        os.killpg(process.pid, number)
        told, _ = process.communicate(timeout=60)
        assert process.returncode == 128 + number
        assert told == f"{number.name}: all ranks were stopped\n"
        for pid in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
    finally:
        for pid in (process.pid, *pids):
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        process.wait()


def test_a_process_that_is_killed_is_told_with_its_signal(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, time\n"
        "os.kill(os.getpid(), 9) if os.environ['RANK'] == '1' else time.sleep(99)\n"
    )
    ended = stageline("run", "--num-processes", "2", str(script))
    assert ended.returncode == 2
    assert ended.stderr == (
        f"error: rank 1 of {script} was killed by signal 9 (SIGKILL), and the others were stopped: "
        "see its output above\n"
    )
