"""Whether layers fit on a rank, before they are cut: for cuts that keep to the memory there is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from stageline.costs import Costs
from stageline.planning.partition.stages import Machines, states_of
from stageline.planning.profiling.profile import LayerCost, Measurement
from stageline.report.memory import peak_memory
from stageline.schedules.schedule import Schedule

Run = tuple[int, int]  # of layers, from and up to
Sums = list[float]


@dataclass(frozen=True)
class Room:
    """Sums over the first layers, and how many micro-batches each stage holds.

    It errs on the safe side: a stage is counted with all that passes by its first layer, a rank's
    stages as if they held most at the same time, and any layer as if it needed as much for a moment
    as the one that needs most.
    """

    weights: Sums  # bytes of one version of them
    always: Sums  # bytes of what belongs to them
    kept: Sums  # bytes of activations from F to I
    passing: Sums  # bytes of values that are made before a layer and read from it on
    held: tuple[float, ...]  # by stage: micro-batches that wait for a gradient, at most
    versions: tuple[float, ...]  # by stage: of its weights, at most
    stages: tuple[tuple[int, ...], ...]  # by rank
    memory: tuple[float, ...]  # by rank
    recompute: bool

    @staticmethod
    def of(
        measurement: Measurement,
        schedule: Schedule,
        machines: Machines,
        optimizer: str,
        *,
        recompute: bool,
    ) -> Room:
        copies = 1 + states_of(optimizer)  # gradients, and what the optimizer keeps
        momentary = max(layer.momentary for layer in measurement.layers)
        ranks, stages = range(schedule.num_ranks), range(schedule.num_stages)
        return Room(
            _sums(measurement.layers, lambda la: la.parameters + la.buffers),
            _sums(measurement.layers, lambda la: copies * la.parameters),
            _sums(measurement.layers, lambda la: la.activation),
            passing_bytes(measurement),
            tuple(_most(schedule, stage, "activation") for stage in stages),
            tuple(_most(schedule, stage, "parameters") for stage in stages),
            tuple(schedule.stages_of(rank) for rank in ranks),
            tuple(device.memory_bytes - momentary for device in machines.devices),
            recompute,
        )

    def fits(self, runs: tuple[Run, ...], rank: int) -> bool:
        size = sum(map(self._size, runs, self.stages[rank]))
        if self.recompute:  # one of them at a time brings back what its backward needs
            size += max(self.kept[stop] - self.kept[start] for start, stop in runs)
        return size <= self.memory[rank]

    def _size(self, run: Run, stage: int) -> float:
        start, stop = run
        activation = self.passing[start]
        if not self.recompute:
            activation += self.kept[stop] - self.kept[start]
        weights = self.versions[stage] * (self.weights[stop] - self.weights[start])
        return weights + self.always[stop] - self.always[start] + self.held[stage] * activation


def _sums(layers: Sequence[LayerCost], size: Callable[[LayerCost], float]) -> Sums:
    return list(accumulate(map(size, layers), initial=0.0))


def passing_bytes(measurement: Measurement) -> Sums:
    """Of values that are made before a layer and read from it on."""
    changes = [0.0] * (len(measurement.layers) + 2)
    for value in measurement.values:
        if value.writer >= 0 and value.readers:
            changes[value.writer + 1] += value.size
            changes[max(value.readers) + 1] -= value.size
    return list(accumulate(changes))


def _most(schedule: Schedule, stage: int, name: str) -> float:
    """Activations of a stage, or versions of its weights, that its rank holds at a time.

    Until their weight gradients are there: what is freed before that is not counted on.
    """
    none: dict[str, Any] = {"activation": 0.0}
    one = [float(other == stage) for other in range(schedule.num_stages)]
    row = schedule.actions[schedule.placement[stage]]
    return max(peak_memory([row], (0,) * schedule.num_stages, Costs(**none | {name: one})))
