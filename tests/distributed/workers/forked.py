"""Starts the ranks of fitting.py by forks, which takes milliseconds: torch is imported once.

folder 2 500 29500      reads such lines: where, how many ranks, how many steps, which port
4711 4712               answers with their processes' numbers
-9 1                    and with how they ended, when all of them have
"""

from __future__ import annotations

import os
import sys
from traceback import print_exc

import torch
from tests.distributed.workers import fitting
from torch import nn

import stageline as sl
from stageline.runtime.ambient import Ambient
from stageline.runtime.shapes import value_shapes


def start(rank: int, folder: str, num_ranks: str, steps: str, port: str, attempt: int) -> int:
    """The number of the new process."""
    process = os.fork()
    if process:
        return process
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": num_ranks, "MASTER_PORT": port}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RESTART_COUNT": str(attempt)}
    sys.argv[1:] = [folder, steps]
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        fitting.main()
    except BaseException:
        print_exc()
        os._exit(1)
    os._exit(0)


def import_all() -> None:
    """Whatever a rank imports when it is first needed."""
    for name in sl.__all__:
        getattr(sl, name)
    layers = sl.LayerSequence.of([nn.Linear(1, 1)])
    value_shapes(layers, {"x": torch.ones(1, 1)}, Ambient.here())


def main() -> None:
    import_all()
    for attempt, line in enumerate(sys.stdin):
        folder, num_ranks, steps, port = line.split()
        processes = [
            start(rank, folder, num_ranks, steps, port, attempt) for rank in range(int(num_ranks))
        ]
        print(*processes, flush=True)
        codes = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes]
        print(*codes, flush=True)


if __name__ == "__main__":
    main()
