"""Ranks that are not about to do the same: in what, the first argument says."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn

import stageline as sl


def main(what: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    is_other = dist.get_rank() == 1
    width = 5 if is_other and what == "model" else 4
    pipe = sl.Pipeline(
        [nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 4)],
        nn.functional.mse_loss,
        num_ranks=3 if what == "world" else 2,
        num_microbatches=2,
        schedule="gpipe" if is_other and what == "schedule" else "1f1b",
        options=sl.Options(timeout=10.0),
    )
    size = 5 if is_other and what == "batch" else 4
    pipe.step(torch.ones(size, 4), torch.ones(size, 4))


if __name__ == "__main__":
    main(sys.argv[1])
