"""Trains until something stops it."""

from __future__ import annotations

from itertools import count

import torch
import torch.distributed as dist
from torch import nn

import stageline as sl


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    num_ranks = dist.get_world_size()
    pipe = sl.Pipeline(
        [nn.Linear(64, 64) for _ in range(num_ranks)],
        nn.functional.mse_loss,
        num_ranks=num_ranks,
        num_microbatches=4,
        options=sl.Options(timeout=5.0),
    )
    x = torch.ones(8, 64)
    for number in count():
        pipe.step(x, x)
        print(f"step {number}", flush=True)


if __name__ == "__main__":
    main()
