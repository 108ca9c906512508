"""Pictures of the stored results: ratios with their intervals, and host time by micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.compare.contestants import ours, torch_pipelining
from benchmarks.compare.report.outcome import Runs, Speed, host_times, speeds
from experiments.pictures import COLOURS, PAPER, figure, save, style

WANTED = 1.0  # never behind a peer


def draw_all(runs: Runs, folder: Path) -> list[Path]:
    """Draw what there are results for, and return the files."""
    torchs = [each for each in speeds(runs, "pipelines") if is_beside_torch(each)]
    drawn = []
    with style():
        if torchs:
            drawn.append(folder / "ratios.svg")
            draw_ratios(torchs, drawn[-1])
        if host_times(runs):
            drawn.append(folder / "host.svg")
            draw_host(runs, drawn[-1])
    return drawn


def is_beside_torch(speed: Speed) -> bool:
    """Return whether it compares the runtimes: processes beside processes."""
    return speed.peer == torch_pipelining.TORCH and speed.ours == ours.PROCESSES


def draw_ratios(found: Sequence[Speed], path: Path) -> None:
    """Draw a line for each cell: the median as a point, the interval as a bar."""
    picture = figure(8.0, 1.2 + 0.16 * len(found))
    axes = picture.add_subplot()
    workloads = list(dict.fromkeys(each.cell.split(" | ")[0] for each in found))
    for place, each in enumerate(found):
        colour = COLOURS[workloads.index(each.cell.split(" | ")[0]) % len(COLOURS)]
        axes.plot((each.ratio.low, each.ratio.high), (place, place), color=colour, alpha=0.6)
        axes.plot(each.ratio.median, place, "o", color=colour, markersize=4)
    axes.axvline(WANTED, color=PAPER, linestyle="--")
    axes.set_yticks(range(len(found)), [each.cell for each in found], fontsize=7)
    axes.set_ylim(len(found) - 0.5, -0.5)
    axes.set_xlabel("throughput of Stageline over torch, same order: median and 95 % interval")
    save(picture, path)


def draw_host(runs: Runs, path: Path) -> None:
    """Draw a line for each contestant, with the intervals of its medians."""
    found = host_times(runs)
    picture = figure(7.0, 3.8)
    axes = picture.add_subplot()
    names = list(dict.fromkeys(name for each in found for name in each.microseconds))
    for colour, name in zip(COLOURS, names, strict=False):
        rows = [(each.num_microbatches, each.microseconds[name]) for each in found]
        counts, times = [count for count, _ in rows], [time for _, time in rows]
        axes.plot(counts, [time.median for time in times], "o-", color=colour, label=name)
        lows, highs = [time.low for time in times], [time.high for time in times]
        axes.fill_between(counts, lows, highs, color=colour, alpha=0.15)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("micro-batches of a step")
    axes.set_ylabel("µs per action of the busiest rank")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
    save(picture, path)
