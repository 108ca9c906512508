"""The first rank saves, or reports, and the second does not; it takes the next step instead."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD

import stageline as sl


def main(what: str, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    pipe = sl.Pipeline(
        [nn.Linear(4, 4) for _ in range(2)],
        nn.functional.mse_loss,
        num_ranks=2,
        num_microbatches=2,
        options=sl.Options(timeout=4.0),
    )
    optimizer = SGD(pipe.parameters(), 0.1)
    x = torch.ones(4, 4)
    if what != "first":
        pipe.step(x, x)
    if dist.get_rank() == 0:
        sl.save(folder, pipe, optimizer, step=1, wait=what != "report")
    for _ in range(2):
        pipe.step(x, x)
    print("never reached")


if __name__ == "__main__":
    main(*sys.argv[1:])
