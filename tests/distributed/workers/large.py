"""A model on the meta device that no process here has the memory for, cut in two that have."""

from __future__ import annotations

import re
import resource
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import stageline as sl

WIDTH, MEBIBYTE = 4096, 2**20  # a layer has 64 MiB


def data_in_use() -> int:
    found = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return 1024 * int(found[1])


def main(num_ranks: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with torch.device("meta"):
        layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6)]
    batch = torch.ones(4, WIDTH)
    # with gradients the model has 768 MiB, half of it 384
    # (the stacks of the threads count as well, 8 MiB each)
    resource.setrlimit(resource.RLIMIT_DATA, (data_in_use() + 660 * MEBIBYTE,) * 2)
    pipe = sl.Pipeline(layers, nn.functional.mse_loss, num_ranks=int(num_ranks), num_microbatches=2)
    optimizer = torch.optim.SGD(pipe.parameters(), 0.1)
    losses = []
    for _ in range(3):
        losses.append(float(pipe.step(batch, batch).loss))
        optimizer.step()
        optimizer.zero_grad()
    assert losses[2] < losses[0]
    print("trained", losses)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
