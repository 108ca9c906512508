"""Sums over the replicas of a pipeline, or of a stage: gradients, sample counts and statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import reduce
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from stageline.runtime.backends.backend import Collectives, Group
from stageline.runtime.exactness.batch_norm import NormMoments
from stageline.runtime.exactness.gradient_types import gradient_type
from stageline.runtime.placement.layout import Layout

if TYPE_CHECKING:
    from stageline.runtime.engine.sharded_layers import ShardedLayers

BUCKET = 25 * 2**20  # bytes that are summed at once
TIED = -1  # in the place of a stage: the weights that several layers use


class Replicas:
    """The other replicas. State: gradients of earlier steps, and sums under way, by stage."""

    def __init__(
        self, collectives: Collectives, layout: Layout, sharded: ShardedLayers | None = None
    ) -> None:
        self.collectives, self.layout, self.sharded = collectives, layout, sharded
        self.is_isolated = False
        self.earlier: dict[nn.Parameter, Tensor] = {}
        self.sums: dict[int, list[Callable[[], None]]] = {}

    @contextmanager
    def isolated(self) -> Iterator[None]:
        """Compute as if this replica were the only one."""
        self.is_isolated = True
        try:
            yield
        finally:
            self.is_isolated = False

    @property
    def _are_several(self) -> bool:
        return self.collectives.num_replicas > 1 and not self.is_isolated

    @property
    def _are_siblings(self) -> bool:
        return self.collectives.size(Group.SIBLINGS) > 1

    def total(self, count: float) -> float:
        """Return the sum of a count over all replicas."""
        if not self._are_several:
            return count
        counted = torch.tensor(count, dtype=torch.float64)
        return float(self.collectives.all_reduce(counted, "sample counts", Group.REPLICAS)())

    def set_gradients_aside(self) -> None:
        """Keep gradients of earlier steps out of the sums of this one."""
        self.earlier, self.sums = {}, {}
        if self._are_several:
            for parameter in self.layout.parameters():
                if parameter.grad is not None:
                    self.earlier[parameter], parameter.grad = parameter.grad, None

    def start(self, stage: int) -> None:
        """Start to sum a stage's gradients; those of tied weights are not complete yet."""
        if self.sharded is not None:
            self.sharded.reduce(stage)
        if self._are_several or self._are_siblings:
            parameters = self.layout.stage_parameters(stage)
            tied = {} if self.layout.schedule.is_stream else self.layout.tied
            done = self.sharded.weights if self.sharded is not None else ()
            own = [p for p in parameters if p.requires_grad and p not in tied and p not in done]
            self._start(stage, own)

    def start_tied(self) -> None:
        """Start to sum the gradients of the tied weights of this process."""
        if self._are_several:
            here = set(self.layout.parameters())
            self._start(TIED, [p for p in self.layout.tied if p in here and p.requires_grad])

    def _start(self, stage: int, parameters: list[nn.Parameter]) -> None:
        sums = self.sums.setdefault(stage, [])
        for bucket in _buckets(parameters):
            shared = self.collectives.shared_sum(bucket) if self._are_several else None
            sums.append(shared or self._flat_sum(bucket))

    def _flat_sum(self, bucket: list[nn.Parameter]) -> Callable[[], None]:
        """Sum all gradients in one tensor, and behind them for each whether it is there.

        From devices, what is there is summed in host memory, which waits for no device.
        """
        parts, there = _parts(bucket), np.array([float(p.grad is not None) for p in bucket])
        if self.collectives.device is None:
            arrive = self._sum(torch.cat([*parts, parts[0].new_tensor(there)]))
            return lambda: _unflatten(*_split(arrive(), len(bucket)), bucket)
        arrive = self._sum(torch.cat(parts))
        group = Group.REPLICAS if self._are_several else Group.SIBLINGS
        arrive_there = self.collectives.all_reduce(torch.from_numpy(there), "gradients", group)

        def finish() -> None:
            arrive_there()
            _unflatten(arrive(), there.tolist(), bucket)

        return finish

    def _sum(self, buffer: Tensor) -> Callable[[], Tensor]:
        if self._are_several:
            return self.collectives.all_reduce(buffer, "gradients", Group.REPLICAS)
        # few, and added up in their order
        return _added(self.collectives.all_gather(buffer, "gradients", Group.SIBLINGS))

    def finish(self, stage: int) -> None:
        """Wait for a stage's sums, and add the gradients of earlier steps."""
        for finish in (*self.sums.pop(stage, ()), *self.sums.pop(TIED, ())):
            finish()
        if self.earlier:
            for parameter in self.layout.stage_parameters(stage):
                gradient = self.earlier.pop(parameter, None)
                if gradient is not None:
                    if parameter.grad is not None:
                        gradient.add_(parameter.grad)
                    parameter.grad = gradient

    def gather_statistics(self, own: NormMoments) -> NormMoments:
        """Return what the BatchNorm layers of this process saw in all replicas, in their order."""
        if self._are_several:
            found = self.collectives.gather(own, "statistics", Group.REPLICAS)
        elif self._are_siblings:
            found = self.collectives.gather(own, "statistics", Group.SIBLINGS)
        else:
            return own
        numbers = sorted({number for seen in found for number in seen})
        joined = {n: [pair for seen in found for pair in seen.get(n, [])] for n in numbers}
        if self._are_several:
            return joined
        return {n: sorted(pairs, key=lambda pair: pair[0]) for n, pairs in joined.items()}


def _added(gathered: Callable[[], list[Tensor]]) -> Callable[[], Tensor]:
    return lambda: reduce(torch.add, gathered())


def _buckets(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Group parameters whose gradients have one type into buckets not much above `BUCKET`."""
    buckets: list[list[nn.Parameter]] = []
    size = 0
    for parameter in parameters:
        dtype = gradient_type(parameter)
        if not buckets or size > BUCKET or dtype != gradient_type(buckets[-1][0]):
            buckets.append([])
            size = 0
        buckets[-1].append(parameter)
        size += parameter.numel() * dtype.itemsize
    return buckets


def _parts(bucket: list[nn.Parameter]) -> list[Tensor]:
    """Return the numbers of all gradients."""
    return [
        torch.zeros(local(p).numel(), dtype=gradient_type(p), device=p.device)
        if p.grad is None
        else local(p.grad).reshape(-1)
        for p in bucket
    ]


def _split(buffer: Tensor, count: int) -> tuple[Tensor, list[float]]:
    return buffer[:-count], buffer[-count:].tolist()


def _unflatten(gradients: Tensor, there: list[float], bucket: list[nn.Parameter]) -> None:
    parts = torch.split(gradients, [local(parameter).numel() for parameter in bucket])
    for parameter, part, is_there in zip(bucket, parts, there, strict=True):
        if is_there:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=gradient_type(parameter))
            local(parameter.grad).copy_(part.view(local(parameter).shape))


def local(tensor: Tensor) -> Tensor:
    """Return this process's part of a tensor that several hold together."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part
