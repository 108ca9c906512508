"""A step in which something happens to rank 1: what, the first argument says."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import stageline as sl


class Trouble(nn.Module):
    """Nothing in the first step."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.calls = what, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if dist.get_rank() != 1:
            return x * 2
        if self.calls == 7 and self.what == "raise":
            raise ValueError("a layer of the user's own")
        if self.calls == 7 and self.what in ("SIGKILL", "SIGSTOP"):
            os.kill(os.getpid(), signal.Signals[self.what])
        return x * 2


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    has_replicas = "replicas" in sys.argv
    mesh = init_device_mesh("cpu", (3, 1), mesh_dim_names=("dp", "pp"))
    trouble = sl.Layer("trouble", Trouble(sys.argv[1]))
    pipe = sl.Pipeline(
        [nn.Linear(4, 4), trouble, nn.Linear(4, 4)],
        nn.functional.mse_loss,
        num_ranks=1 if has_replicas else 3,
        num_microbatches=4,
        mesh=mesh if has_replicas else None,
        options=sl.Options(timeout=4.0, shared_memory="gloo" not in sys.argv),
    )
    x = torch.ones(4, 4)
    for number in range(3):
        pipe.step(x, x)
        print(f"step {number} at {time.time():.2f}")
    print("never reached")


if __name__ == "__main__":
    main()
