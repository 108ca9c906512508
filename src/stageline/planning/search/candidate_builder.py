"""Compute the costs of candidates, with everything that several of them share computed once."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from stageline.costs import Costs
from stageline.planning.partition.partition import partition_layers
from stageline.planning.partition.rank_devices import RankDevices
from stageline.planning.partition.stage_costs import StageCut, reduction_seconds, stage_costs
from stageline.planning.search.candidate import PlanCandidate, ScheduleShape
from stageline.planning.search.training_layouts import DeviceGrid, PlanRequest, TrainingLayout
from stageline.schedules.placement import Placement


class CandidateBuilder:
    """Builds the candidates of one request. State: caches of what candidates have in common."""

    def __init__(self, request: PlanRequest) -> None:
        self.request = request
        self.measurement = cache(request.profile.at)
        self.devices = cache(self._devices)
        self.even_balance = cache(self._even_balance)
        self._cached_costs = cache(self._costs)

    def build(
        self, layout: TrainingLayout, schedule_name: str, shape: ScheduleShape, cut: StageCut
    ) -> PlanCandidate:
        """Return a candidate with the costs of its stages."""
        costs = self._cached_costs(layout, cut, shape.in_halves)
        reductions = reduction_seconds(costs, cut.placement, self.devices(layout.grid))
        if shape.is_asynchronous:  # every step waits for them, not only the last
            costs = replace(costs, reduce=reductions)
        host = self.request.profile.host.step
        return PlanCandidate(layout, schedule_name, shape, cut, costs, reductions, host)

    def with_cut(self, candidate: PlanCandidate, cut: StageCut) -> PlanCandidate:
        """Return the same candidate with another cut."""
        return self.build(candidate.layout, candidate.schedule_name, candidate.shape, cut)

    def saves_time(self, candidate: PlanCandidate) -> list[bool]:
        """Return for each stage whether recomputing it selectively takes less time than wholly."""
        measurement = self.measurement(candidate.layout.microbatch_size)
        stages = candidate.cut.layers_by_stage
        return [measurement.sum_over(layers, "time_saved") > 0 for layers in stages]

    def speeds(self, grid: DeviceGrid) -> tuple[float, ...]:
        """Return the speed of each rank; a stage with replicas is as fast as all of them."""
        devices = self.devices(grid)
        counts = [len(row) if grid.stage_replicas else 1 for row in devices.numbers]
        return tuple(d.speed * n for d, n in zip(devices.devices, counts, strict=True))

    def _devices(self, grid: DeviceGrid) -> RankDevices:
        cluster = self.request.cluster
        if grid.stage_replicas:
            return RankDevices.of_stages(cluster, grid.stage_replicas)
        return RankDevices.of_pipelines(
            cluster, grid.num_ranks, grid.replicas, side_by_side=grid.side_by_side
        )

    def _costs(self, layout: TrainingLayout, cut: StageCut, in_halves: bool) -> Costs:
        return stage_costs(
            self.measurement(layout.microbatch_size),
            self.request.profile.tied,
            cut,
            self.devices(layout.grid),
            in_halves=in_halves,
            optimizer=self.request.optimizer,
            host=self.request.profile.host,
        )

    def _even_balance(self, speeds: tuple[float, ...], placement: Placement) -> tuple[int, ...]:
        """Return the fastest balance, regardless of memory.

        Times are those of the largest profiled micro-batch: their ratios hardly depend on its size.
        """
        times = self.request.profile.measurements[-1].times_in_stage
        return partition_layers(times, placement, speeds)
