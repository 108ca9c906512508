"""Pictures of the results: accuracy over capacity, and transfer beside training from scratch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from experiments.images.plan import Scale
from experiments.images.summary import (
    Accuracies,
    Capacity,
    Runs,
    Transfer,
    capacities,
    transfers,
)
from experiments.pictures import COLOURS, figure, save, style

PARAMETERS = (1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6, 2e6)


def draw(folder: Path, scale: Scale, runs: Runs) -> list[Path]:
    """Write the pictures that there are results for."""
    pictures = []
    with style():
        if points := capacities(scale, runs):
            pictures.append(folder / "capacity.svg")
            draw_capacity(pictures[-1], scale.task, points)
        if found := transfers(scale, runs):
            pictures.append(folder / "transfer.svg")
            draw_transfers(pictures[-1], found)
    return pictures


def draw_capacity(path: Path, task: str, points: list[Capacity]) -> None:
    picture = figure(7.0, 4.0)
    axes = picture.subplots()
    families = sorted({(point.cells, point.num_layers) for point in points})
    for family, colour in zip(families, COLOURS, strict=False):
        alike = [point for point in points if (point.cells, point.num_layers) == family]
        label = f"{family[0]}, L = {family[1]}"
        _line(axes, [p.parameters for p in alike], [p.found for p in alike], colour, label)
        for point in alike:
            _name_point(axes, point, colour)
    _log_scale(axes, PARAMETERS)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.margins(x=0.12, y=0.15)
    axes.set_xlabel("parameters; L normal cells, D filters")
    axes.set_ylabel(f"accuracy on {task} in %, mean ± s")
    axes.legend(title="AmoebaNet", loc="best")
    save(picture, path)


def _name_point(axes: Any, point: Capacity, colour: str) -> None:
    """Write D beside a point, away from a line that rises: above it on the left for the cells D."""
    place = (point.parameters, point.found.mean * 100)
    side, shift = ("right", (-6, 5)) if point.cells == "D" else ("left", (6, -12))
    text = f"D = {point.num_filters}"
    style: Any = {"textcoords": "offset points", "ha": side, "color": colour}
    axes.annotate(text, place, shift, **style)


def draw_transfers(path: Path, found: list[Transfer]) -> None:
    pairs = list(dict.fromkeys((each.source, each.target) for each in found))
    picture = figure(4.2 * len(pairs), 3.6)
    panels = picture.subplots(1, len(pairs), squeeze=False)[0]
    for axes, pair in zip(panels, pairs, strict=True):
        alike = [each for each in found if (each.source, each.target) == pair]
        images = [each.images for each in alike]
        _line(axes, images, [each.tuned for each in alike], COLOURS[0], "fine-tuned")
        _line(axes, images, [each.scratch for each in alike], COLOURS[1], "from scratch")
        _log_scale(axes, images)
        labels = [f"{each.images:,}\n{each.share:.0%}" for each in alike]
        axes.set_xticks(images, labels)
        axes.set_title(" → ".join(pair))
        axes.set_xlabel("images of the target")
    panels[0].set_ylabel("accuracy in %, mean ± s")
    panels[0].legend(loc="lower right")
    save(picture, path)


def _line(axes: Any, places: list[int], found: list[Accuracies], colour: str, label: str) -> None:
    means = [each.mean * 100 for each in found]
    spreads = [each.spread * 100 for each in found]
    axes.errorbar(places, means, spreads, color=colour, label=label, marker="o", capsize=3)


def _log_scale(axes: Any, ticks: Any) -> None:
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
