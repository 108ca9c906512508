"""How long it takes to cut 2,000 layers into 256 stages, on 256 ranks or two each on 128.

python benchmarks/partition.py
"""

from __future__ import annotations

import random
from collections.abc import Callable
from statistics import median
from time import perf_counter

from rich.console import Console
from rich.table import Table

from stageline.planning.partition.one_stage_per_rank import split_layers
from stageline.planning.partition.several_stages_per_rank import split_into_chunks
from stageline.schedules.placement import loop, wave

NUM_LAYERS, NUM_STAGES = 2000, 256


def main() -> None:
    rng = random.Random(0)
    costs = [rng.uniform(0.5, 1.5) for _ in range(NUM_LAYERS)]
    transfers = [rng.uniform(0.0, 0.5) for _ in range(NUM_LAYERS - 1)]
    speeds = [rng.choice([1.0, 1.2]) for _ in range(NUM_STAGES)]
    spiky = [1.0 if layer % 100 == 0 else 1e-6 for layer in range(NUM_LAYERS)]
    cases: dict[str, Callable[[], object]] = {
        "costs only": lambda: split_layers(costs, NUM_STAGES),
        "transfers": lambda: split_layers(costs, NUM_STAGES, transfers=transfers),
        "transfers, speeds": lambda: split_layers(
            costs, NUM_STAGES, transfers=transfers, speeds=speeds
        ),
        "at most 8 layers": lambda: split_layers(
            costs, NUM_STAGES, transfers=transfers, fits=lambda start, stop, _: stop - start <= 8
        ),
        "a few large layers": lambda: split_layers(spiky, NUM_STAGES),
        "loop of two": lambda: split_into_chunks(costs, loop(NUM_STAGES // 2, 2)),
        "wave": lambda: split_into_chunks(costs, wave(NUM_STAGES // 2)),
        "wave, 200 layers, proven": lambda: split_into_chunks(costs[:200], wave(16)),
    }
    table = Table("case", "seconds", box=None)
    for name, run in cases.items():
        taken = []
        for _ in range(3):
            start = perf_counter()
            run()
            taken.append(perf_counter() - start)
        table.add_row(name, f"{median(taken):.3f}")
    Console().print(table)


if __name__ == "__main__":
    main()
