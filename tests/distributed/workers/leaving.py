"""Both ranks end with an error of their own; says how many threads of gloo's are there then."""

from __future__ import annotations

import weakref
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import stageline as sl


def num_threads() -> int:
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    return sum("gloo_runloop" in name for name in names)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    # made before the pipeline's own, it runs after them
    weakref.finalize(main, lambda: print(f"{num_threads()} of {made} threads left"))
    pipe = sl.Pipeline(
        [nn.Linear(4, 4), nn.Linear(4, 4)], nn.functional.mse_loss, num_ranks=2, num_microbatches=2
    )
    pipe.step(torch.ones(4, 4), torch.ones(4, 4))
    made = num_threads()
    raise ValueError("enough")  # the traceback keeps the pipeline


if __name__ == "__main__":
    main()
