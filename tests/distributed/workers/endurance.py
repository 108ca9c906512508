"""Trains for many steps, and compares what the process holds at the end with what it held early."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Sized
from pathlib import Path
from time import monotonic, sleep
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import stageline as sl
from stageline.runtime.backends.processes.backend import ProcessesBackend

# bytes: malloc's arenas settle in the first 1,500 steps; from there to 3,000 nothing is added
SETTLING = 4 * 2**20


class Held(NamedTuple):
    memory: int  # bytes, resident
    tensors: int
    threads: int
    files: int
    pending: int  # messages and losses on their way


def held(pipe: sl.Pipeline) -> Held:
    gc.collect()
    backend = pipe._session.backend
    assert isinstance(backend, ProcessesBackend)
    incoming, outgoing = backend.incoming, backend.connection.outgoing
    waiting: list[Sized] = [
        incoming.promised,
        incoming.early,
        outgoing.fresh,
        backend.collectives.sums,
        pipe._session.assembly.replicas.sums,
    ]
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Held(
        pages * os.sysconf("SC_PAGE_SIZE"),
        sum(issubclass(type(item), Tensor) for item in gc.get_objects()),
        threading.active_count(),
        num_files(),
        sum(map(len, waiting)) + outgoing.leaving.qsize(),
    )


def num_files() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208  an iterator would count itself


def files_left(before: int) -> int:
    """Count open files when all ranks have closed theirs: rank 0 has the other end of some."""
    dist.barrier()
    end = monotonic() + 10.0
    while num_files() > before and monotonic() < end:
        sleep(0.01)  # the store's thread closes connections when it comes to it
    return num_files()


def train(pipe: sl.Pipeline, steps: range) -> None:
    """With short batches, traces and evaluations in between."""
    optimizer = torch.optim.SGD(pipe.parameters(), 1e-3)
    for step in steps:
        x = torch.randn(5 if step % 7 == 0 else 8, 64)
        if step % 50 == 0:
            with pipe.trace():
                pipe.step(x, x)
            pipe.eval()
            pipe(x)
            pipe.train()
        else:
            result = pipe.step(x, x)
            if step % 10 == 0:
                assert result.loss > 0
        optimizer.step()
        optimizer.zero_grad()
    assert pipe.step(x, x).loss > 0  # all losses before it have arrived as well
    optimizer.zero_grad()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    early, late = int(sys.argv[1]), int(sys.argv[2])
    for schedule in ("1f1b", "zbv"):
        dist.barrier()
        before = num_files()
        pipe = sl.Pipeline(
            [nn.Linear(64, 64) for _ in range(8)],
            nn.functional.mse_loss,
            num_ranks=dist.get_world_size(),
            num_microbatches=2 * dist.get_world_size(),
            schedule=schedule,
        )
        torch.manual_seed(0)
        train(pipe, range(early))
        first = held(pipe)
        train(pipe, range(early, late))
        last = held(pipe)
        pipe.close()
        del pipe
        gc.collect()
        after = files_left(before)
        print(f"rank {dist.get_rank()}, {schedule}, step {early}: {first}")
        print(f"rank {dist.get_rank()}, {schedule}, step {late}: {last}, closed: {after - before}")
        assert all(b <= a for a, b in zip(first[1:], last[1:], strict=True)), (first, last)
        assert last.memory - first.memory < SETTLING, (first, last)
        assert after <= before, (before, after)
    print("no growth")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
