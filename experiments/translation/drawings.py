"""Pictures of the results: figure 3, batch sizes, and losses with and without the remedies."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments import pictures
from experiments.translation.scale import REMEDIES, Scale
from experiments.translation.summary import (
    Runs,
    batch_sizes,
    gains,
    mean_score,
    of_remedy,
    of_size,
    ordered_groups,
    smoothed,
)

WINDOW, GAIN_WINDOW = 15, 3  # languages that a point of a smoothed line is the mean of


def panels(picture: Figure, count: int, *, sharey: bool = False) -> list[Axes]:
    """Return axes side by side, in the style of all pictures."""
    with pictures.style():
        return list(picture.subplots(1, count, sharey=sharey, squeeze=False)[0])


def draw_figure3(runs: Runs, scale: Scale, path: Path) -> None:
    """Draw the gain over bilingual baselines, and BLEU of all languages, ordered by data."""
    picture = pictures.figure(11, 4.5)
    left, right = panels(picture, 2)
    _draw_gains(left, runs, scale)
    _draw_bleu(right, runs, scale)
    pictures.save(picture, path)


def _draw_gains(axes: Axes, runs: Runs, scale: Scale) -> None:
    counts = runs["corpus"]["training"]
    for size, colour in zip(scale.sizes, pictures.COLOURS, strict=False):
        if found := gains(runs, scale, size):
            values, places = list(found.values()), range(len(found))
            axes.plot(places, values, "o", color=colour, markersize=3, alpha=0.5)
            axes.plot(places, smoothed(values, GAIN_WINDOW), color=colour, label=str(size))
            labels = [f"{name}\n{counts[name]}" for name in found]
            axes.set_xticks(list(places), labels, fontsize=7)
    axes.axhline(0, color=pictures.PAPER, linewidth=1)
    axes.set(title="gain over bilingual baselines", ylabel="BLEU")
    axes.set_xlabel("languages with a baseline, and their training pairs")
    axes.legend()


def _draw_bleu(axes: Axes, runs: Runs, scale: Scale) -> None:
    order = ordered_groups(runs)
    for size, colour in zip(scale.sizes, pictures.COLOURS, strict=False):
        if found := of_size(runs, scale, size):
            values = [mean_score(found, name) for name in order]
            axes.plot(values, ".", color=colour, markersize=3, alpha=0.4)
            axes.plot(smoothed(values, WINDOW), color=colour, label=str(size))
    counts = runs["corpus"]["training"]
    places = range(0, len(order), 8)
    axes.set_xticks(list(places), [f"{order[i]}\n{counts[order[i]]}" for i in places], fontsize=7)
    axes.set(title="BLEU of every language", ylabel="BLEU", ylim=(0, None))
    axes.set_xlabel("languages by decreasing data")
    axes.legend()


def draw_batch_sizes(runs: Runs, scale: Scale, path: Path) -> None:
    """Draw BLEU and loss over the size of batches."""
    picture = pictures.figure(7, 3)
    found = batch_sizes(runs, scale)
    bleu = [[fmean(run["bleu"].values()) for run in every] for every in found.values()]
    loss = [[run["loss"] for run in every] for every in found.values()]
    values = (("mean BLEU", bleu), ("loss", loss))
    for axes, (name, points) in zip(panels(picture, 2), values, strict=True):
        for place, every in zip(found, points, strict=True):
            axes.plot([place] * len(every), every, ".", color=pictures.COLOURS[0], alpha=0.5)
        axes.plot(list(found), [*map(fmean, points)], "-", color=pictures.COLOURS[0])
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(found), list(map(str, found)))
        axes.set(xlabel="tokens in a batch", ylabel=name)
    pictures.save(picture, path)


def draw_stability(runs: Runs, scale: Scale, path: Path) -> None:
    """Draw the loss at every step, one panel for each learning rate."""
    picture = pictures.figure(12, 3.2)
    every = panels(picture, len(scale.deep_rates), sharey=True)
    for axes, rate in zip(every, scale.deep_rates, strict=True):
        for remedy, colour in zip(REMEDIES, pictures.COLOURS, strict=False):
            for number, run in enumerate(of_remedy(runs, scale, remedy, rate)):
                label = None if number else remedy
                axes.plot(run["losses"], color=colour, label=label, linewidth=0.8, alpha=0.7)
        axes.set(title=f"learning rate {rate:g}", xlabel="step")
    every[0].set(ylabel="loss")
    every[0].legend()
    pictures.save(picture, path)
