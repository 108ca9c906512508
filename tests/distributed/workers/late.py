"""A rank that is later than the others by more than the pipeline's timeout: where, it is told."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD

import stageline as sl
from stageline.checkpoint import load as load_module
from stageline.checkpoint import save as save_module

TIMEOUT = 3.0
X = torch.ones(4, 4)


def rest() -> None:
    if dist.get_rank() == 1:
        time.sleep(2.5 * TIMEOUT)


def main(where: str, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if where == "pipeline":
        rest()
    pipe = sl.Pipeline(
        [nn.Linear(4, 4) for _ in range(2)],
        nn.functional.mse_loss,
        num_ranks=2,
        num_microbatches=2,
        options=sl.Options(timeout=TIMEOUT),
    )
    optimizer = SGD(pipe.parameters(), 0.1)
    if where == "first step":
        rest()
    if where in ("write", "read"):
        sl.save(folder, pipe, optimizer, step=0)
        module, name = (
            (save_module, "write_shard") if where == "write" else (load_module, "_prepare")
        )
        act, calls = getattr(module, name), list[float]()

        def slow(*args: object, **options: object) -> object:
            calls.append(time.monotonic())
            rest()
            return act(*args, **options)

        with patch.object(module, name, slow):
            sl.save(folder, pipe, optimizer, step=1)
            sl.load(folder, pipe, optimizer)
        assert len(calls) == 1
    for _ in range(2):
        assert pipe.step(X, X).loss > 0
    if where == "second step":
        rest()
    pipe.step(X, X)
    pipe.close()
    print("trained")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
