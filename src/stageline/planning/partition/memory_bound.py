"""Bound the memory of runs of layers on a rank, for cuts that have to fit in memory.

The bound is used while layers are cut; `search/memory_check.py` then checks the exact peak.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from stageline.costs import Costs
from stageline.planning.partition.rank_devices import RankDevices
from stageline.planning.partition.several_stages_per_rank import LayerRun
from stageline.planning.partition.stage_costs import num_optimizer_states
from stageline.planning.profiling.profile_result import LayerCost, Measurement
from stageline.report.memory import peak_memory
from stageline.schedules.schedule import Schedule

PrefixSums = list[float]  # over the first layers


@dataclass(frozen=True)
class MemoryBound:
    """An upper bound for the memory that a rank needs for its runs of layers.

    A stage counts all values that pass its first layer, a rank's stages count as if they held most
    at the same time, and every layer as if it needed as much temporary memory as the worst.
    """

    weights: PrefixSums  # bytes of one version of parameters and buffers
    optimizer: PrefixSums  # bytes of gradients and optimizer states
    activations: PrefixSums  # bytes kept from F to I
    crossing: list[float]  # bytes of values that are written before a layer and read from it on
    max_microbatches: tuple[float, ...]  # by stage: in flight at a time, at most
    max_versions: tuple[float, ...]  # by stage: of its weights at a time, at most
    stages: tuple[tuple[int, ...], ...]  # by rank
    memory: tuple[float, ...]  # by rank, without the temporary memory of a layer
    recompute: bool

    @staticmethod
    def of(
        measurement: Measurement,
        schedule: Schedule,
        devices: RankDevices,
        optimizer: str,
        *,
        recompute: bool,
    ) -> MemoryBound:
        copies = 1 + num_optimizer_states(optimizer)  # with the gradient
        temporary = max(layer.momentary for layer in measurement.layers)
        ranks, stages = range(schedule.num_ranks), range(schedule.num_stages)
        return MemoryBound(
            _prefix_sums(measurement.layers, lambda layer: layer.parameters + layer.buffers),
            _prefix_sums(measurement.layers, lambda layer: copies * layer.parameters),
            _prefix_sums(measurement.layers, lambda layer: layer.activation),
            crossing_bytes(measurement),
            tuple(_max_held(schedule, stage, "activation") for stage in stages),
            tuple(_max_held(schedule, stage, "parameters") for stage in stages),
            tuple(schedule.stages_of(rank) for rank in ranks),
            tuple(device.memory_bytes - temporary for device in devices.devices),
            recompute,
        )

    def fits(self, runs: tuple[LayerRun, ...], rank: int) -> bool:
        """Return True if a rank has enough memory for these runs, one for each of its stages."""
        size = sum(map(self._stage_bytes, runs, self.stages[rank]))
        if self.recompute:  # one stage at a time recomputes what its backward needs
            size += max(self.activations[stop] - self.activations[start] for start, stop in runs)
        return size <= self.memory[rank]

    def _stage_bytes(self, run: LayerRun, stage: int) -> float:
        start, stop = run
        activation = self.crossing[start]
        if not self.recompute:
            activation += self.activations[stop] - self.activations[start]
        weights = self.max_versions[stage] * (self.weights[stop] - self.weights[start])
        static = weights + self.optimizer[stop] - self.optimizer[start]
        return static + self.max_microbatches[stage] * activation


def _prefix_sums(layers: Sequence[LayerCost], size: Callable[[LayerCost], float]) -> PrefixSums:
    return list(accumulate(map(size, layers), initial=0.0))


def crossing_bytes(measurement: Measurement) -> list[float]:
    """Return for each layer the bytes of values written before it and read by it or later ones."""
    changes = [0.0] * (len(measurement.layers) + 2)
    for value in measurement.values:
        if value.writer >= 0 and value.readers:
            changes[value.writer + 1] += value.size
            changes[max(value.readers) + 1] -= value.size
    return list(accumulate(changes))


def _max_held(schedule: Schedule, stage: int, name: str) -> float:
    """Return the most activations, or versions of weights, of a stage that a rank holds at a time.

    Activations count until W: what is freed before that is ignored.
    """
    nothing: dict[str, Any] = {"activation": 0.0}
    one = [float(other == stage) for other in range(schedule.num_stages)]
    row = schedule.actions[schedule.placement[stage]]
    return max(peak_memory([row], (0,) * schedule.num_stages, Costs(**nothing | {name: one})))
