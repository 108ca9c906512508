"""How long actions and messages take on a placement, from costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from stageline.costs import Costs, Link
from stageline.schedules.action import Action, Kind
from stageline.schedules.placement import Placement, Replicas, rank_of


@dataclass(frozen=True)
class Times:
    """Durations by kind and stage, and the way of a message from one stage to another."""

    costs: Costs
    placement: Placement
    replicas: Replicas = ()

    @cached_property
    def durations(self) -> Mapping[Kind, tuple[float, ...]]:
        """By kind, then by stage. Recomputation belongs to I or B; messages take no rank's time."""
        fields = ("forward", "input_grad", "weight_grad", "recompute", "step")
        forward, inputs, weights, again, step = (self._all(name) for name in fields)
        inputs = tuple(a + b for a, b in zip(again, inputs, strict=True))
        both = tuple(a + b for a, b in zip(inputs, weights, strict=True))
        known = {Kind.F: forward, Kind.I: inputs, Kind.W: weights, Kind.B: both, Kind.STEP: step}
        return dict.fromkeys(Kind, (0.0,) * len(self.placement)) | known

    def latency(self, source: int, target: int) -> float:
        """From a message's last byte leaving one stage to its arrival at another, either way."""
        here, there = self.placement[source], self.placement[target]
        if here == there:
            return 0.0
        writer = min(source, target)  # values go up and gradients down, so the lower stage wrote it
        return self._all("transfer")[writer] + self.costs.link(here, there).latency

    def on_the_link(self, source: int, target: int) -> float:
        """How long a message's bytes occupy the link between two ranks."""
        here, there = self.placement[source], self.placement[target]
        if here == there:
            return 0.0
        return self._all("message")[min(source, target)] / self.costs.link(here, there).bandwidth

    def latency_of(self, send: Action) -> float:
        """As `latency`, for a message between the ranks that run its micro-batch."""
        if not self.replicas:
            return self.latency(send.stage, send.peer)
        return self._all("transfer")[min(send.stage, send.peer)] + self._link(send).latency

    def link_time(self, send: Action) -> float:
        """As `on_the_link`, for a message between the ranks that run its micro-batch."""
        if not self.replicas:
            return self.on_the_link(send.stage, send.peer)
        return self._all("message")[min(send.stage, send.peer)] / self._link(send).bandwidth

    def _link(self, send: Action) -> Link:
        ends = (
            rank_of(self.placement, self.replicas, stage, send.microbatch)
            for stage in (send.stage, send.peer)
        )
        return self.costs.link(*ends)

    def reduction(self, stage: int) -> float:
        """How long the reduction of a stage's gradients takes, beside what its rank computes."""
        return self._all("reduce")[stage]

    @property
    def ends_with_a_step(self) -> bool:
        return any(self._all("step")) or any(self._all("reduce"))

    def whole_way(self, source: int, target: int) -> float:
        """The least time from a message's making to its arrival."""
        return self.on_the_link(source, target) + self.latency(source, target)

    def _all(self, name: str) -> tuple[float, ...]:
        return self.costs.per_stage(name, len(self.placement))
