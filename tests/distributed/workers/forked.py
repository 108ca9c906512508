"""Starts the ranks of another worker by forks, which takes milliseconds: torch is imported once.

Its name is the argument. Each line read from the standard input is JSON for one start:
    {"num_ranks": 2, "port": 29500, "arguments": ["folder", "20"], "log": "folder"}
The answers are lines with the processes' numbers, and, when all have ended, with their exit codes.
A rank writes to the file output-<rank> of the folder `log`.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from typing import Any

import torch
from torch import nn

import stageline as sl
from stageline.runtime.backends.processes.messages.shapes import predict_specs
from stageline.runtime.exactness.caller_context import ForwardContext


def import_all() -> None:
    """Whatever a rank imports when it is first needed."""
    for name in sl.__all__:
        getattr(sl, name)
    layers = sl.LayerSequence.of([nn.Linear(1, 1)])
    predict_specs(layers, {"x": torch.ones(1, 1)}, ForwardContext.current())


def start(request: dict[str, Any], attempt: int) -> bool:
    """Whether this is one of the new processes; the old one waits until they have ended."""
    processes = []
    for rank in range(request["num_ranks"]):
        process = os.fork()
        if not process:
            own = {"RANK": rank, "WORLD_SIZE": request["num_ranks"], "MASTER_PORT": request["port"]}
            own |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RESTART_COUNT": attempt}
            os.environ |= {name: str(value) for name, value in own.items()}
            log = os.open(f"{request['log']}/output-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, sys.stdout.fileno())
            os.dup2(log, sys.stderr.fileno())
            sys.argv[1:] = request["arguments"]
            return True
        processes.append(process)
    print(*processes, flush=True)
    ended = dict(os.wait() for _ in processes)
    print(*(os.waitstatus_to_exitcode(ended[process]) for process in processes), flush=True)
    return False


def main() -> None:
    worker = import_module(f"tests.distributed.workers.{sys.argv[1]}")
    import_all()
    for attempt, line in enumerate(sys.stdin):
        if start(json.loads(line), attempt):
            worker.main()
            return


if __name__ == "__main__":
    main()
