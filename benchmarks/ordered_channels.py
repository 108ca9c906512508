"""Parity over ordered channels with random delays: all schedules, on 2, 3 and 4 processes.

    python benchmarks/ordered_channels.py --seeds 50      some ten minutes on two cores
    python benchmarks/ordered_channels.py --worlds        and worlds of 64 to 1,024 ranks

With each seed every pipeline makes a step, or trains on a stream of four mini-batches, and has to
end with the bits of a plain loop. A channel has the rules of a communicator of NCCL; half of all
operations begin up to 4 ms late. Simulated streams are checked meanwhile.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path
from time import perf_counter
from typing import Annotated

import typer

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.distributed.fork_servers import fork_servers
from tests.distributed.launch import launch
from tests.distributed.test_worlds import LARGE, SMALL, check_world

LINE = re.compile(r"(\w+): (\d+) seeds, differs with \[(.*)\]")
AT_ONCE = 10  # seeds of one launch; the next has other models for the same schedules
TIMEOUT = 1800.0  # seconds of a launch


def main(
    seeds: Annotated[int, typer.Option(help="Seeds of delays.")] = 50,
    ranks: Annotated[list[int] | None, typer.Option(help="Processes; 2, 3 and 4.")] = None,
    worlds: Annotated[bool, typer.Option(help="Check large worlds as well.")] = False,
) -> None:
    """Train, and print a Markdown table of how many seeds led to the bits of a plain loop."""
    counts, start = ranks or [2, 3, 4], perf_counter()
    found: dict[int, Counter[str]] = {}
    with fork_servers():
        for count in counts:
            found[count] = _equal(count, seeds)
    names = [*dict.fromkeys(name for each in found.values() for name in each)]
    print("| schedule |" + "".join(f" {count} processes |" for count in counts))
    print("|---|" + "---|" * len(counts))
    for name in names:
        cells = (f" {each[name]} of {seeds} |" for each in found.values())
        print(f"| {name} |{''.join(cells)}")
    good = sum(each.total() for each in found.values())
    expected = len(names) * len(counts) * seeds
    print(f"\n{good} of {expected} with the same bits, in {perf_counter() - start:.0f} s")
    if worlds:
        _check_worlds()
    raise SystemExit(good < expected)


def _equal(num_ranks: int, seeds: int) -> Counter[str]:
    """Return for each schedule how many seeds led to the bits of a plain loop on all ranks."""
    good: Counter[str] = Counter()
    for first in range(0, seeds, AT_ONCE):
        length = min(AT_ONCE, seeds - first)
        ends = launch("channel_parity", num_ranks, str(first), str(length), timeout=TIMEOUT)
        differing: dict[str, set[str]] = {}
        for rank, ended in enumerate(ends):
            lines = [LINE.match(line) for line in ended.output.splitlines()]
            if ended.code or not all(lines):
                raise SystemExit(f"{num_ranks} processes, rank {rank}:\n{ended.output}")
            for line in filter(None, lines):
                bad = differing.setdefault(line[1], set())
                bad.update(filter(None, line[3].split(", ")))
        good.update({name: length - len(bad) for name, bad in differing.items()})
        print(f"{num_ranks} processes, seeds {first} to {first + length - 1}: done", flush=True)
    return good


def _check_worlds() -> None:
    print("\n| schedule | ranks | replicas | micro-batches | channels | messages | seconds |")
    print("|---|---|---|---|---|---|---|")
    for world in (*SMALL, *LARGE):
        start = perf_counter()
        num_channels, num_messages = check_world(*world)
        family, num_ranks, num_microbatches, num_replicas = world
        cells = family, num_ranks, num_replicas, num_microbatches, num_channels, num_messages
        print("|", " | ".join(map(str, cells)), f"| {perf_counter() - start:.0f} |", flush=True)


if __name__ == "__main__":
    typer.run(main)
