"""Run sl.fit many times in one group of processes: every line of a file is one run.

A line has save_every, report_every and the form: "background" saves as `fit` does, "waiting" waits
for every save, "stream" is a pipeline that steps its own optimizers.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from shutil import rmtree
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

import stageline as sl
from stageline.training import run as training_run
from stageline.zoo.cases import grouped

STEPS = 20
sgd = partial(SGD, lr=0.1, momentum=0.9)


def model(num_ranks: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(num_ranks)))


def data() -> DataLoader[Any]:
    torch.manual_seed(1)
    return DataLoader(TensorDataset(torch.randn(20, 6), torch.randn(20, 6)), 4, shuffle=True)


def weights_of_a_plain_run(num_ranks: int) -> dict[str, Tensor]:
    made = model(num_ranks)
    pipe = sl.Pipeline(
        made, nn.functional.mse_loss, num_ranks=1, num_microbatches=2, backend="serial"
    )
    sl.fit(pipe, data(), sgd(pipe.parameters()), steps=STEPS)
    return dict(pipe.state_dict())


def run(folder: Path, save_every: int, report_every: int, form: str) -> dict[str, Tensor]:
    num_ranks = dist.get_world_size()
    sizes: dict[str, Any] = {"num_ranks": num_ranks, "num_microbatches": 2, "timeout": 30.0}
    if form == "stream":
        sizes["optimizer"] = sgd
    pipe = sl.Pipeline(model(num_ranks), nn.functional.mse_loss, **grouped(sizes))
    intervals: dict[str, Any] = {"save_every": save_every, "report_every": report_every}
    optimizer = None if form == "stream" else sgd(pipe.parameters())

    def save(*args: Any, wait: bool, **options: Any) -> None:
        sl.save(*args, wait=wait or form == "waiting", **options)

    with patch.object(training_run, "save", save):
        reports = sl.fit(pipe, data(), optimizer, steps=STEPS, folder=folder, **intervals)
    wanted = {*range(report_every, STEPS + 1, report_every), STEPS}
    assert [report.step for report in reports] == sorted(wanted)
    found = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
    pipe.close()
    return found


def main(folder: Path, lines: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    expected = weights_of_a_plain_run(dist.get_world_size())
    for number, line in enumerate(lines.read_text().splitlines()):
        save_every, report_every, form = line.split()
        own = folder / f"run-{number}"
        found = run(own, int(save_every), int(report_every), form)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items()), line
        assert sl.latest(own) == own / f"step-{STEPS:08d}"
        dist.barrier()
        if dist.get_rank() == 0:
            rmtree(own)
            print(f"done {line}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
