"""`stageline run`: a script as several processes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

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
if "--fail" in sys.argv:
    raise SystemExit(3)
dist.destroy_process_group()
"""


def stageline(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from stageline.cli import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)


def test_a_script_runs_as_several_ranks(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    ended = stageline("run", "--ranks", "2", str(script), "--lr", "0.1")
    assert ended.returncode == 0, ended.stderr
    losses = re.findall(r"with \['--lr', '0.1'\]: (\d\.\d{4})", ended.stdout)
    assert len(losses) == 2
    assert losses[0] == losses[1]


def test_a_script_that_fails_is_named(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    ended = stageline("run", "--ranks", "2", str(script), "--fail")
    assert ended.returncode == 2
    assert "train.py ended with exit code 3" in ended.stderr


def test_a_script_that_is_not_there_is_told(tmp_path: Path) -> None:
    ended = stageline("run", str(tmp_path / "nothing.py"))
    assert ended.returncode == 2
    assert "nothing.py is not there, but has to be a Python script" in ended.stderr
