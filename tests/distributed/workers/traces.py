"""Traces a step between simulated devices, and prints the times of each action."""

from __future__ import annotations

import json

import torch
import torch.distributed as dist
from torch import nn

import stageline as sl


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    x = torch.ones(4, 4)
    with sl.Pipeline(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
        nn.functional.mse_loss,
        num_ranks=2,
        num_microbatches=2,
        schedule="gpipe",
        options=sl.Options(check_streams=True),
    ) as pipe:
        pipe.step(x, x)
        with pipe.trace() as trace:
            pipe.step(x, x)
    assert trace.recording is not None
    times = trace.recording.times.values()
    print(json.dumps({str(each.action): each[1:5] for row in times for each in row}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
