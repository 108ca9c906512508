"""One process of a group: measures cells together with the others, for launch.py.

stageline run --num-processes 2 benchmarks/compare/worker.py JOB.json RESULTS.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.compare.cells import ablation, by_hand, host, memory, pipelines
from benchmarks.compare.machine import machine
from experiments.results import Results

KINDS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "ablation": ablation.measure,
    "pipelines": pipelines.measure,
    "host": host.measure,
    "memory": memory.measure,
    "by-hand": by_hand.measure,
}


def main(job: str, path: str) -> None:
    """Measure all cells of the job; the first process stores each at once."""
    torch.set_num_threads(1)
    given = json.loads(Path(job).read_text(encoding="utf-8"))
    dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    results = Results(Path(path))
    for name, cell in given["cells"].items():
        conditions = machine()
        found = KINDS[given["kind"]](cell) | {"cell": cell, "machine": conditions}
        if dist.get_rank() == 0:
            store(results, name, found)
        dist.barrier()
    dist.destroy_process_group()


def store(results: Results, name: str, found: dict[str, Any]) -> None:
    """Write a cell into the file of results."""
    results.run_once(name, lambda: found, seed=0)


if __name__ == "__main__":
    main(*sys.argv[1:])
