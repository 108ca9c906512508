"""Which runs the experiment consists of, at full size and at the size of a test."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from experiments.images.recipe import Recipe
from experiments.images.training import Training

Size = tuple[str, int, int]  # cells, L normal cells, D filters


@dataclass(frozen=True)
class Scale:
    """The runs of all parts."""

    task: str  # that networks of several sizes are trained on
    main: Size
    capacities: tuple[Size, ...]
    num_seeds: int
    recipe: Recipe
    transfers: tuple[tuple[str, str], ...]  # source and target
    shares: tuple[float, ...]
    num_transfer_runs: int
    transfer_recipe: Recipe
    parity_recipe: Recipe

    def trainings(self) -> list[Training]:
        """Return the runs of the main network."""
        return [_training(self.task, self.main, self.recipe, s) for s in range(self.num_seeds)]

    def capacity(self) -> list[Training]:
        """Return the runs of networks of all sizes."""
        sizes, seeds = self.capacities, range(self.num_seeds)
        return [_training(self.task, size, self.recipe, seed) for size in sizes for seed in seeds]

    def transfer(self) -> list[Training]:
        """Return the sources, then runs in pairs: from the source's weights, and from scratch."""
        sources = [_training(task, self.main, self.recipe, 0) for task, _ in self.transfers]
        pairs = zip(sources, (target for _, target in self.transfers), strict=True)
        return [*sources, *(run for pair in pairs for run in self._runs_of(*pair))]

    def _runs_of(self, source: Training, target: str) -> Iterator[Training]:
        for seed in range(self.num_transfer_runs):
            for share in self.shares:
                scratch = _training(target, self.main, self.transfer_recipe, seed)
                scratch = replace(scratch, share=share)
                yield replace(scratch, source=source)
                yield scratch

    def parity(self) -> list[Training]:
        """Return the runs that are compared on one and on four partitions."""
        _, num_layers, num_filters = self.main
        sizes: list[Size] = [(cells, num_layers, num_filters) for cells in "BD"]
        return [_training(self.task, size, self.parity_recipe, 0) for size in sizes]


def _training(task: str, size: Size, recipe: Recipe, seed: int) -> Training:
    return Training(task, *size, recipe, seed)


FULL = Scale(
    task="fashion",
    main=("B", 3, 16),
    capacities=(
        *(("B", 3, 8), ("B", 3, 16), ("B", 6, 16), ("B", 3, 32), ("B", 6, 32)),
        *(("D", 3, 8), ("D", 3, 16)),
    ),
    num_seeds=3,
    recipe=Recipe(steps=300),
    transfers=(("fashion", "digits"), ("fashion-6", "fashion-4")),
    shares=(0.01, 0.1, 1.0),
    num_transfer_runs=5,
    transfer_recipe=Recipe(steps=40),
    parity_recipe=Recipe(steps=10),
)
# Without Fashion-MNIST the digits take its place.
FULL_DIGITS = replace(FULL, task="digits", transfers=(("digits-6", "digits-4"),))
QUICK = replace(
    FULL_DIGITS,
    main=("B", 3, 8),
    capacities=(("B", 3, 8), ("D", 3, 8)),
    num_seeds=2,
    recipe=Recipe(steps=3, batch_size=8),
    shares=(0.01, 1.0),
    num_transfer_runs=2,
    transfer_recipe=Recipe(steps=1, batch_size=8),
    parity_recipe=Recipe(steps=2, batch_size=8),
)
