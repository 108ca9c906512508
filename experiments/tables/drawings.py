"""Draw the results: throughput, links, the parts of a step, and schedules."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.lines import Line2D

from experiments.pictures import COLOURS, PAPER, figure, save, style
from experiments.tables import paper, schedules
from experiments.tables.outcome import (
    Runs,
    breakdown,
    measured_throughput,
    of_steps,
    predicted_breakdown,
    predicted_throughput,
)
from experiments.tables.predict import Cell
from experiments.tables.workloads import GPU, WORKLOADS, Workload

PARTS = ("compute", "recompute", "bubble", "imbalance", "transfer", "set-up", "update")
PART_COLOURS = dict(
    zip(PARTS, ("#3366cc", "#8fb0ea", "#e8b04a", "#c0392b", "#2e8b57", "#7f8c8d", "#a569bd"),
        strict=True)
)  # fmt: skip
POSITIONS = range(len(paper.RANKS))


def draw_all(runs: Runs, folder: Path) -> None:
    with style():
        draw_throughput(runs, folder / "throughput.svg")
        draw_links(runs, folder / "links.svg")
        draw_breakdown(runs, folder / "breakdown.svg")
        draw_schedules(runs, folder / "schedules.svg")


def draw_throughput(runs: Runs, path: Path) -> None:
    """Draw table 2: a panel for each model, a colour for each number of micro-batches."""
    workloads = [each for each in WORKLOADS if not each.has_slow_links]
    picture = figure(9.5, 3.6)
    for number, workload in enumerate(workloads):
        axes = picture.add_subplot(1, len(workloads), number + 1)
        for colour, count in zip(COLOURS, workload.microbatches, strict=False):
            draw_row(axes, runs, workload, count, colour)
        axes.set_title(workload.name)
        axes.set_xticks(POSITIONS, [f"K = {ranks}" for ranks in paper.RANKS])
        axes.set_ylim(0, 7)
        if not number:
            axes.set_ylabel("throughput, K = 2 and M = 1 is 1")
            axes.legend(handles=legend(workload.microbatches), fontsize=8, loc="upper left")
    save(picture, path)


def legend(microbatches: Sequence[int]) -> list[Line2D]:
    """Return a colour for each number of micro-batches, and a line for each source."""
    pairs = zip(COLOURS, microbatches, strict=False)
    colours = [Line2D([], [], color=colour, label=f"M = {count}") for colour, count in pairs]
    return [
        *colours,
        Line2D([], [], color="black", label="predicted"),
        Line2D([], [], color="black", linestyle="none", marker="o", label="measured"),
        Line2D([], [], color="black", linestyle="--", alpha=0.55, label="paper"),
    ]


def draw_row(axes: Any, runs: Runs, workload: Workload, count: int, colour: str) -> None:
    """Draw the paper's figures dashed, predictions as a line, and measurements as points."""
    row = [Cell(workload, ranks, count) for ranks in paper.RANKS]
    published = paper.throughput(workload.name)
    if published:
        values = [published[ranks, count] for ranks in paper.RANKS]
        axes.plot(POSITIONS, values, "--", color=colour, alpha=0.55)
    axes.plot(
        POSITIONS,
        [predicted_throughput(runs, cell) for cell in row],
        color=colour,
        label=workload.name,
    )
    found = [measured_throughput(runs, cell) for cell in row]
    points = [
        (x, each.value, each.spread) for x, each in zip(POSITIONS, found, strict=True) if each
    ]
    if points:
        xs, ys, spreads = zip(*points, strict=True)
        style = {"fmt": "o", "color": colour, "capsize": 3}
        axes.errorbar(xs, ys, yerr=spreads, **style)


def draw_links(runs: Runs, path: Path) -> None:
    """Draw table 3, and how its speed-up depends on the links."""
    workloads = [each for each in WORKLOADS if each.has_slow_links]
    picture = figure(9.5, 3.6)
    left, right = (picture.add_subplot(1, 2, number) for number in (1, 2))
    for colour, workload in zip(COLOURS, workloads, strict=False):
        draw_row(left, runs, workload, 32, colour)
        if run := runs.get(f"links {workload.name}"):
            rates, ratios = zip(*run["points"], strict=True)
            gigabytes = [rate / 1e9 for rate in rates]
            right.plot(gigabytes, ratios, "o-", color=colour, label=workload.name, markersize=3)
    left.set_xticks(POSITIONS, [f"K = {ranks}" for ranks in paper.RANKS])
    left.set_ylabel("throughput, K = 2 is 1")
    left.set_title("M = 32: line predicted, points measured, dashed paper", fontsize=9)
    left.legend(fontsize=8)
    right.axvline(GPU.link / 1e9, color=PAPER, linestyle=":", label="assumed for table 3")
    right.set_xscale("log")
    right.set_xlabel("bandwidth of a link, GB/s")
    right.set_ylabel("from 2 to 8 ranks, predicted")
    right.legend(fontsize=7)
    save(picture, path)


def draw_breakdown(runs: Runs, path: Path) -> None:
    """Draw the parts of a step as stacked bars, the paper's first."""
    bars: list[tuple[str, dict[str, float]]] = [("paper\nK = 2", paper.BREAKDOWN)]
    for ranks in paper.RANKS:
        found = {"predicted": predicted_breakdown(runs, ranks), "measured": breakdown(runs, ranks)}
        bars += [(f"{name}\nK = {ranks}", shares) for name, shares in found.items() if shares]
    picture = figure(8.0, 4.2)
    axes = picture.add_subplot()
    heights = [0.0] * len(bars)
    for part in PARTS:
        sizes = [100 * shares.get(part, 0.0) for _, shares in bars]
        xs = range(len(bars))
        axes.bar(xs, sizes, 0.6, bottom=heights, color=PART_COLOURS[part], label=part)
        label_parts(axes, sizes, heights)
        heights = [height + size for height, size in zip(heights, sizes, strict=True)]
    axes.set_xticks(range(len(bars)), [title for title, _ in bars])
    axes.set_ylabel("% of ranks × step time")
    axes.set_axisbelow(True)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5))
    save(picture, path)


def label_parts(axes: Any, sizes: Sequence[float], heights: Sequence[float]) -> None:
    """Write the figures of parts that are high enough for text."""
    for x, (size, height) in enumerate(zip(sizes, heights, strict=True)):
        if size >= 2.5:
            place = {"ha": "center", "va": "center", "fontsize": 7}
            axes.text(x, height + size / 2, f"{size:.1f}", color="white", **place)


def draw_schedules(runs: Runs, path: Path) -> None:
    """Draw throughput over the memory of the fullest rank: simulated hollow, measured full."""
    picture = figure(7.5, 4.2)
    axes = picture.add_subplot()
    colours = (*COLOURS, "#555555")
    for colour, variant in zip(colours, schedules.VARIANTS, strict=False):
        expected = runs.get(f"simulate {variant.title}")
        found = runs.get(f"schedule {variant.title}")
        if expected:
            place = max(expected["peaks"]) / 1e6, expected["rate"]
            hollow: Any = {"markerfacecolor": "none", "linestyle": "none"}
            axes.plot(*place, "o", color=colour, markersize=9, **hollow, label=variant.title)
        if found:
            rate, memory = of_steps(found["rates"]), max(found["peaks"]) / 1e6
            axes.errorbar(memory, rate.value, yerr=rate.spread, fmt="o", color=colour, capsize=3)
        if expected and found:
            axes.plot((place[0], memory), (place[1], rate.value), color=colour, alpha=0.4)
    axes.set_xlabel("memory of the fullest rank, MB: weights and their versions, gradients, "
                    "momentum, activations")  # fmt: skip
    axes.set_ylabel("micro-batches a second")
    axes.set_title("hollow: simulated, full: measured", fontsize=9)
    axes.set_ylim(bottom=0)
    if axes.get_lines():
        axes.legend(fontsize=8, loc="lower right")
    save(picture, path)
