"""Is training the same to the bit, whatever the schedule, backend, ranks and recomputation?

python benchmarks/parity.py             trains all combinations beside a plain loop
python benchmarks/parity.py --quick     a sample of them
python benchmarks/parity.py --streams   those of threads, on simulated devices whose streams and
                                        host are checked
"""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from itertools import product

import torch
from rich.console import Console
from rich.progress import track

import stageline as sl
from stageline.runtime.placement.checks import RECOMPUTE
from stageline.runtime.stage import kept_results
from stageline.zoo.cases import (
    BACKENDS,
    CASES,
    NUM_MICROBATCHES,
    RANKS,
    Combination,
    Trained,
    differences,
    make_case,
    pipelined,
    plainly,
)

EVERY = 23  # for a sample; prime to the number of choices of each sort, so that all of them come up


def combinations(backends: Sequence[str] = BACKENDS) -> list[Combination]:
    choices = product(CASES, sl.schedule_names(synchronous=True), backends, RANKS, RECOMPUTE)
    return [Combination(*choice) for choice in choices]


def can_be_built(row: Combination) -> bool:
    try:
        sl.build_schedule(row.schedule, num_ranks=row.num_ranks, num_microbatches=NUM_MICROBATCHES)
    except sl.ScheduleError:
        return False
    return True


def fault(row: Combination, wanted: Trained, *, streams: bool) -> str:
    """What is not as in the plain loop, or nothing."""
    options = row._asdict()
    case = make_case(options.pop("model"))
    try:
        names = differences(pipelined(case, **options, check_streams=streams), wanted)
    except sl.StagelineError as error:
        return str(error)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"differs in {', '.join(names[:3])}{more}" if names else ""


def faults(rows: list[Combination], console: Console, *, streams: bool) -> Iterator[str]:
    wanted = {model: plainly(make_case(model)) for model in CASES}
    for row in track(rows, "training", console=console, transient=True):
        if found := fault(row, wanted[row.model], streams=streams):
            yield f"{row}: {found}"


def main(*, quick: bool, streams: bool) -> int:
    """Gives back the exit code."""
    console = Console()
    torch.set_num_threads(1)  # of one operator: the ranks need the cores
    kept_results.LEAST_PRODUCTS_PER_VALUE = 1  # the models are narrow
    chosen = combinations(["threads"] if streams else BACKENDS)[:: EVERY if quick else 1]
    rows = [row for row in chosen if can_be_built(row)]
    start, num_faults = time.perf_counter(), 0
    for found in faults(rows, console, streams=streams):
        num_faults += 1
        console.print(found, style="red", markup=False, highlight=False, soft_wrap=True)
    took = time.perf_counter() - start
    skipped = f"; {len(chosen) - len(rows)} cannot be built" if len(chosen) > len(rows) else ""
    console.print(
        f"{len(rows) - num_faults} of {len(rows)} combinations equal to the bit"
        f"{' and ordered' if streams else ''}, in {took:.0f} s{skipped}",
        highlight=False,
    )
    return 1 if num_faults else 0


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a sample, in about a minute")
    parser.add_argument("--streams", action="store_true", help="simulate devices and check them")
    sys.exit(main(**vars(parser.parse_args())))
