"""The second rank stops or ends, or has another batch; the first does something with it: what."""

from __future__ import annotations

import os
import signal
import sys

import torch
import torch.distributed as dist
from torch import nn

import stageline as sl


def leave(how: str) -> None:
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "exit":
        os._exit(0)


def main(what: str, how: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    is_other = dist.get_rank() == 1
    if is_other and what == "connect":
        dist.new_group = lambda *_, **__: leave(how)
    pipe = sl.Pipeline(
        [nn.Linear(8, 8) for _ in range(4)],
        nn.functional.mse_loss,
        num_ranks=2,
        num_microbatches=4,
        options=sl.Options(timeout=4.0),
    )
    x = torch.ones(16, 8)
    if what != "first":
        assert pipe.step(x, x).loss > 0
    if is_other:
        leave(how)
    if what == "norm":
        pipe.clip_grad_norm_(1.0)
    elif what == "evaluate":
        pipe.eval()(x)
    else:
        pipe.step(*[x[: 12 if is_other and how == "shapes" else 16]] * 2)


if __name__ == "__main__":
    main(*sys.argv[1:])
