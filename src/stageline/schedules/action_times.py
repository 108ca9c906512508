"""Compute how long actions and messages take on a placement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from stageline.costs import Costs, Link
from stageline.schedules.action import Action, Kind
from stageline.schedules.placement import Placement, Replicas, rank_of


@dataclass(frozen=True)
class ActionTimes:
    """The durations of actions and messages, from the costs of the stages."""

    costs: Costs
    placement: Placement
    replicas: Replicas = ()

    @cached_property
    def durations(self) -> Mapping[Kind, tuple[float, ...]]:
        """Return durations by kind and stage; I and B include recomputation, messages take none."""
        fields = ("forward", "input_grad", "weight_grad", "recompute", "step")
        forward, inputs, weights, recompute, step = (self._per_stage(name) for name in fields)
        inputs = tuple(a + b for a, b in zip(recompute, inputs, strict=True))
        both = tuple(a + b for a, b in zip(inputs, weights, strict=True))
        known = {Kind.F: forward, Kind.I: inputs, Kind.W: weights, Kind.B: both, Kind.STEP: step}
        return dict.fromkeys(Kind, (0.0,) * len(self.placement)) | known

    def lead(self, stage: int) -> float:
        """Return how long before its gradient arrives an I or B may start: it recomputes first."""
        return self._per_stage("recompute")[stage]

    def latency(self, source: int, target: int) -> float:
        """Return the time from sending a message's last byte to its arrival."""
        here, there = self.placement[source], self.placement[target]
        if here == there:
            return 0.0
        writer = min(source, target)  # values go to later stages, and their gradients back
        return self._per_stage("transfer")[writer] + self.costs.link(here, there).latency

    def occupancy(self, source: int, target: int) -> float:
        """Return how long a message's bytes occupy the link between two ranks."""
        here, there = self.placement[source], self.placement[target]
        if here == there:
            return 0.0
        return (
            self._per_stage("message")[min(source, target)] / self.costs.link(here, there).bandwidth
        )

    def message_latency(self, send: Action) -> float:
        """Return the latency of a message between the ranks that run its micro-batch."""
        if not self.replicas:
            return self.latency(send.stage, send.peer)
        return self._per_stage("transfer")[min(send.stage, send.peer)] + self._link(send).latency

    def message_occupancy(self, send: Action) -> float:
        """Return how long a message occupies the link between the ranks of its micro-batch."""
        if not self.replicas:
            return self.occupancy(send.stage, send.peer)
        return self._per_stage("message")[min(send.stage, send.peer)] / self._link(send).bandwidth

    def _link(self, send: Action) -> Link:
        ends = (
            rank_of(self.placement, self.replicas, stage, send.microbatch)
            for stage in (send.stage, send.peer)
        )
        return self.costs.link(*ends)

    def reduction_time(self, stage: int) -> float:
        """Return how long a stage's gradient reduction takes; it overlaps with compute."""
        return self._per_stage("reduce")[stage]

    @property
    def has_step_time(self) -> bool:
        """Return whether reductions or optimizer steps take time."""
        return any(self._per_stage("step")) or any(self._per_stage("reduce"))

    def transfer_time(self, source: int, target: int) -> float:
        """Return the least time from the making of a message to its arrival."""
        return self.occupancy(source, target) + self.latency(source, target)

    def _per_stage(self, name: str) -> tuple[float, ...]:
        return self.costs.per_stage(name, len(self.placement))
