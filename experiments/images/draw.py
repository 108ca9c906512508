"""Pictures of the results: accuracy over capacity, and transfer beside training from scratch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments.images.plan import Scale
from experiments.images.summary import Capacity, Runs, Transfer, capacities, transfers
from experiments.pictures import COLOURS, figure, save


def draw(folder: Path, scale: Scale, runs: Runs) -> list[Path]:
    """Write the pictures that there are results for."""
    pictures = []
    if points := capacities(scale, runs):
        pictures.append(folder / "capacity.svg")
        draw_capacity(pictures[-1], scale.task, points)
    if found := transfers(scale, runs):
        pictures.append(folder / "transfer.svg")
        draw_transfers(pictures[-1], scale.transfers, found)
    return pictures


def draw_capacity(path: Path, task: str, points: list[Capacity]) -> None:
    picture = figure(7.0, 4.0)
    axes = picture.subplots()
    for colour, cells in zip(COLOURS, sorted({point.cells for point in points}), strict=False):
        alike = sorted((p for p in points if p.cells == cells), key=lambda point: point.parameters)
        _line(axes, alike, colour, f"AmoebaNet-{cells}")
    axes.set_xscale("log")
    axes.margins(x=0.12, y=0.15)
    axes.set_xlabel("parameters")
    axes.set_ylabel(f"accuracy on {task} in %, mean ± s")
    axes.legend(loc="lower right")
    save(picture, path)


def _line(axes: Any, points: list[Capacity], colour: str, label: str) -> None:
    sizes = [point.parameters for point in points]
    means = [point.found.mean * 100 for point in points]
    spreads = [point.found.spread * 100 for point in points]
    axes.errorbar(sizes, means, spreads, color=colour, label=label, marker="o", capsize=3)
    for point, size, height in zip(points, sizes, means, strict=True):
        text = f"({point.num_layers}, {point.num_filters})"
        axes.annotate(text, (size, height), (6, -12), textcoords="offset points", color=colour)


def draw_transfers(path: Path, pairs: tuple[tuple[str, str], ...], found: list[Transfer]) -> None:
    picture = figure(4.0 * len(pairs), 3.6)
    panels = picture.subplots(1, len(pairs), squeeze=False)[0]
    for axes, (source, target) in zip(panels, pairs, strict=True):
        alike = [each for each in found if (each.source, each.target) == (source, target)]
        images = [each.images for each in alike]
        for colour, name in zip(COLOURS, ("tuned", "scratch"), strict=False):
            kinds = [each.tuned if name == "tuned" else each.scratch for each in alike]
            means, spreads = zip(*((k.mean * 100, k.spread * 100) for k in kinds), strict=True)
            label = "fine-tuned" if name == "tuned" else "from scratch"
            axes.errorbar(images, means, spreads, color=colour, label=label, marker="o", capsize=3)
        axes.set_xscale("log")
        axes.set_title(f"{source} → {target}")
        axes.set_xlabel("images of the target: 1, 10 and 100 %")
    panels[0].set_ylabel("accuracy in %, mean ± s of 5 runs")
    panels[0].legend(loc="lower right")
    save(picture, path)
