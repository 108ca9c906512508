"""The examples for other training loops, in two processes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.distributed.launch import launch

EXAMPLES = Path(__file__).parents[2] / "examples"
PARTS = "Lightning would save a checkpoint in each of 2 processes, but each has the weights of its"
DEVICES = "the Trainer has 2 processes, each with the whole model, but the pipeline has the"
DIVIDED = r"data: rank 0 has \w+, but rank 1 has \w+: all ranks make the same calls with the same"
COPIES = "accelerate counts 2 processes as copies of the whole model, but the pipeline has them"


@pytest.fixture(autouse=True)
def frameworks() -> None:
    for name in ("transformers", "accelerate", "lightning"):
        pytest.importorskip(name)


@pytest.mark.slow
def test_two_processes_have_the_numbers_of_one_and_refuse_what_would_be_wrong(
    tmp_path: Path,
) -> None:
    ends = launch("frameworks", 2, str(tmp_path))
    assert [end.code for end in ends] == [0, 0], ends[0].output + ends[1].output
    found, other = (json.loads((tmp_path / f"found-{rank}.json").read_text()) for rank in (0, 1))
    assert_same_as_one_process(found, tmp_path)
    assert found["bare_loop"] == other["bare_loop"]
    assert found["lightning_module"] == other["lightning_module"]
    for refused in (found["refused"], other["refused"]):
        for text, pattern in zip(refused, (PARTS, DEVICES, DIVIDED, COPIES), strict=True):
            assert re.match(pattern, text)


def assert_same_as_one_process(found: dict[str, list[object]], folder: Path) -> None:
    from examples import (  # noqa: PLC0415
        accelerate_loop,
        bare_loop,
        lightning_module,
        transformers_trainer,
    )

    torch.set_num_threads(1)
    assert found["bare_loop"] == bare_loop.train(show=False)
    assert found["lightning_module"] == lightning_module.train(2, None, is_first=False)
    assert found["accelerate_loop"] == accelerate_loop.train(2)
    logged = transformers_trainer.train(2, folder / "alone")
    for key in ("loss", "grad_norm", "eval_loss"):
        assert [e[key] for e in found["transformers_trainer"] if key in e] == [  # type: ignore[operator, index]  # JSON
            e[key] for e in logged if key in e
        ]
    saved = [load_file(folder / n / "model" / "model.safetensors") for n in ("trainer", "alone")]
    assert saved[0].keys() == saved[1].keys()
    assert all(torch.equal(tensor, saved[1][name]) for name, tensor in saved[0].items())


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["bare_loop", "transformers_trainer", "lightning_module", "accelerate_loop"]
)
def test_a_script_prints_the_same_in_one_process_and_in_two(name: str, tmp_path: Path) -> None:
    starts: tuple[list[str], ...] = ([], ["-m", "stageline", "run", "--num-processes", "2"])
    printed = []
    for start in starts:
        ended = subprocess.run(
            [sys.executable, *start, str(EXAMPLES / f"{name}.py")],
            cwd=tmp_path,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        printed.append(re.findall(r"^.* (?:loss|evaluation) [\d.]+$", ended.stdout, re.MULTILINE))
    assert printed[0] == printed[1]
    assert len(printed[0]) >= 6
