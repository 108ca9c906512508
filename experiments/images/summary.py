"""Means and spreads of runs that differ in their seeds only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import mean, stdev
from typing import NamedTuple

from experiments.images.plan import Scale
from experiments.images.training import Training
from experiments.results import Run

Runs = Mapping[str, Run]


class Accuracies(NamedTuple):
    """The accuracies of several runs."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return mean(self.values)

    @property
    def spread(self) -> float:
        """Return the standard deviation of the sample; 0 for a single run."""
        return stdev(self.values) if len(self.values) > 1 else 0.0

    def __str__(self) -> str:
        """Show percent.

        >>> str(Accuracies((0.9, 0.91, 0.92)))
        '91.0 ± 1.0 (3)'
        """
        return f"{self.mean * 100:.1f} ± {self.spread * 100:.1f} ({len(self.values)})"


class Capacity(NamedTuple):
    """A size of network, and how well it does."""

    cells: str
    num_layers: int
    num_filters: int
    parameters: int
    found: Accuracies

    @property
    def model(self) -> str:
        return f"{self.cells}({self.num_layers},{self.num_filters})"


class Transfer(NamedTuple):
    """A share of a target's images, with and without the weights of a source."""

    source: str
    target: str
    share: float
    images: int
    tuned: Accuracies
    scratch: Accuracies

    @property
    def gain(self) -> Accuracies:
        """Return the differences of pairs, which are trained on the same images."""
        pairs = zip(self.tuned.values, self.scratch.values, strict=True)
        return Accuracies(tuple(tuned - scratch for tuned, scratch in pairs))


def capacities(scale: Scale, runs: Runs) -> list[Capacity]:
    """Return what is known of each size; sizes without a run are left out."""
    found = []
    for cells, num_layers, num_filters in scale.capacities:
        alike = [r for r in scale.capacity() if _size(r) == (cells, num_layers, num_filters)]
        if done := _done(alike, runs):
            parameters = runs[done[0].name]["parameters"]
            found.append(
                Capacity(cells, num_layers, num_filters, parameters, _accuracies(done, runs))
            )
    return found


def transfers(scale: Scale, runs: Runs) -> list[Transfer]:
    """Return each target and share of which there are pairs of runs of both kinds."""
    found = []
    for source, target in scale.transfers:
        for share in scale.shares:
            tuned = [
                run
                for run in scale.transfer()
                if run.source and (run.task, run.share) == (target, share)
            ]
            scratch = [replace(run, source=None) for run in tuned]
            pairs = zip(tuned, scratch, strict=True)
            if done := [pair for pair in pairs if len(_done(pair, runs)) == 2]:
                both = [_accuracies(alike, runs) for alike in zip(*done, strict=True)]
                images = runs[done[0][0].name]["images"]
                found.append(Transfer(source, target, share, images, *both))
    return found


def _size(run: Training) -> tuple[str, int, int]:
    return run.cells, run.num_layers, run.num_filters


def _done(trainings: Sequence[Training], runs: Runs) -> list[Training]:
    return [training for training in trainings if training.name in runs]


def _accuracies(trainings: Sequence[Training], runs: Runs) -> Accuracies:
    return Accuracies(tuple(runs[training.name]["accuracy"] for training in trainings))
