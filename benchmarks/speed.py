"""How long build, check and simulate take, by the number of actions, and a search.

python benchmarks/speed.py     prints two tables and draws speed.svg beside this file
"""

from __future__ import annotations

import time
from itertools import pairwise
from math import log10
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

import stageline as sl

SIZES = [(8, 32), (16, 64), (32, 128), (64, 256), (128, 512), (128, 1024)]
REPEATS = 5
PICTURE = Path(__file__).with_suffix(".svg")


def seconds(num_ranks: int, num_microbatches: int) -> tuple[float, float, float]:
    """Of build, check and simulate for 1F1B."""
    times = [time.perf_counter()]
    schedule = sl.build_schedule("1f1b", num_ranks=num_ranks, num_microbatches=num_microbatches)
    times.append(time.perf_counter())
    sl.check(schedule)
    times.append(time.perf_counter())
    sl.simulate(schedule)
    times.append(time.perf_counter())
    build, check, simulate = (after - before for before, after in pairwise(times))
    return build, check, simulate


def measure() -> list[tuple[int, float]]:
    """Prints a row per size; gives back the number of actions and the median of all three."""
    table = Table(
        "p", "m", "actions", "build", "check", "simulate", "all", "µs per action", box=None
    )
    points = []
    for num_ranks, num_microbatches in SIZES:
        runs = [seconds(num_ranks, num_microbatches) for _ in range(REPEATS)]
        parts = [median(run[i] for run in runs) for i in range(3)]
        actions, total = 2 * num_ranks * num_microbatches, sum(parts)
        points.append((actions, total))
        cells = [
            *(f"{part:.3f} s" for part in parts),
            f"{total:.3f} s",
            f"{1e6 * total / actions:.2f}",
        ]
        table.add_row(str(num_ranks), str(num_microbatches), str(actions), *cells)
    Console(width=110).print(table)
    return points


def plot(points: list[tuple[int, float]]) -> str:
    """A log-log plot as SVG; the dashed line is proportional to the number of actions."""

    def x(actions: float) -> float:
        return 70 + 125 * (log10(actions) - log10(400))

    def y(total: float) -> float:
        return 40 + 85 * (log10(3) - log10(total))

    slope = median(total / actions for actions, total in points)
    line = " ".join(f"{x(n):.1f},{y(slope * n):.1f}" for n in (500, 300_000))
    dots = "".join(f'<circle cx="{x(n):.1f}" cy="{y(t):.1f}" r="5"/>' for n, t in points)
    ticks = [(f"{n:,}", x(n), 345.0, "middle") for n in (1_000, 10_000, 100_000)]
    ticks += [(f"{t:g} s", 60.0, y(t) + 4, "end") for t in (0.01, 0.1, 1)]
    labels = "".join(
        f'<text x="{a:.1f}" y="{b:.1f}" text-anchor="{side}">{text}</text>'
        for text, a, b, side in ticks
    )
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 480 390" font-family="sans-serif" '
        'font-size="12"><rect width="480" height="390" fill="white"/>'
        '<text x="240" y="22" text-anchor="middle" font-size="14">'
        "build + check + simulate, 1F1B</text>"
        f'<polyline points="{line}" fill="none" stroke="#999" stroke-dasharray="6 4"/>'
        f'<g fill="#0072b2">{dots}</g>{labels}'
        '<path d="M70 40V330H460" fill="none" stroke="black"/>'
        '<text x="265" y="372" text-anchor="middle">actions (dashed: proportional)</text></svg>\n'
    )


def search() -> None:
    table = Table("search", "p", "m", "seconds", "span bubble", "least for this memory", box=None)
    costs = sl.Costs(1.0, 1.0, 0.75, 0.04, retained=0.4)
    for name, num_ranks, num_microbatches in (
        ("zb_2p", 32, 256),
        ("zb_1p", 32, 256),
        ("zbv", 32, 256),
    ):
        start = time.perf_counter()
        schedule = sl.build_schedule(
            name, num_ranks=num_ranks, num_microbatches=num_microbatches, costs=costs
        )
        took = time.perf_counter() - start
        timeline = sl.simulate(schedule, costs)
        least = max(0.0, 1 - max(timeline.busy) / timeline.span_lower_bound)
        bubbles = [f"{timeline.span_bubble:.4f}", f"{least:.4f}"]
        table.add_row(name, str(num_ranks), str(num_microbatches), f"{took:.1f}", *bubbles)
    Console(width=110).print(table)


if __name__ == "__main__":
    PICTURE.write_text(plot(measure()))
    search()
