"""BatchNorm over micro-batches: normalise each by itself, update running statistics in order.

With "minibatch" the running statistics are updated once per mini-batch, as if it had not been cut:
the moments of its micro-batches are merged in ascending order. With "microbatch" they are updated
by each micro-batch, as in a plain loop. A recomputed forward counts in neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  as everybody calls it

from stageline.model.function_interceptor import FunctionInterceptor
from stageline.torch_private import BatchNormBase, storage_identity

MODES = ("minibatch", "microbatch")
PARAMETERS = tuple(signature(F.batch_norm).parameters)


class Moments(NamedTuple):
    """Number of samples, mean, and sum of squared deviations from it, by channel, in float64."""

    samples: int
    mean: Tensor
    squares: Tensor

    def merge(self, other: Moments) -> Moments:
        samples = self.samples + other.samples
        difference = other.mean - self.mean
        mean = self.mean + difference * (other.samples / samples)
        weight = self.samples * other.samples / samples
        squares = self.squares + other.squares + difference.square() * weight
        return Moments(samples, mean, squares)


# By number of the BatchNorm module: each micro-batch's number and moments, in ascending order.
NormMoments = dict[int, list[tuple[int, Moments]]]


@dataclass
class RunningStatistics:
    """The running statistics of one stage. State: the moments of the micro-batches of a step.

    `scratch` is the identity of memory that the norms of a forward write their moments to.
    """

    modules: list[BatchNormBase]
    mode: str
    scratch: set[int] = field(default_factory=set)
    # by id of the buffer: step and micro-batch, and its moments
    moments: dict[int, list[tuple[tuple[int, int], Moments]]] = field(default_factory=dict)

    @staticmethod
    def of(modules: Iterable[nn.Module], mode: str) -> RunningStatistics:
        norms = (part for module in modules for part in module.modules())
        return RunningStatistics([n for n in norms if isinstance(n, BatchNormBase)], mode)

    @contextmanager
    def observe(self, step: int, microbatch: int, *, again: bool) -> Iterator[None]:
        """Collect the moments of a forward; `again` if it is a recomputation."""
        tracked = [norm for norm in self.modules if norm.training and norm.track_running_stats]
        if not tracked or (self.mode == "microbatch" and not again):
            yield
            return
        counts = [_count(norm).clone() for norm in tracked]
        try:
            record = self._recorder((step, microbatch)) if not again else None
            with _WithoutRunningStatistics(record, self.scratch):
                yield
        finally:
            self.scratch.clear()
            for norm, count in zip(tracked, counts, strict=True):
                _count(norm).copy_(count)

    def _recorder(self, when: tuple[int, int]) -> Callable[[Tensor, Moments], None]:
        def record(running_mean: Tensor, moments: Moments) -> None:
            self.moments.setdefault(id(running_mean), []).append((when, moments))

        return record

    def clear(self) -> None:
        """Discard all moments."""
        self.moments.clear()

    def forget(self, step: int, microbatch: int | None = None) -> None:
        """Discard the moments of a step, or of one micro-batch, that will be run again."""
        for found in self.moments.values():
            found[:] = [
                pair for pair in found if pair[0][0] != step or microbatch not in (None, pair[0][1])
            ]

    def update(self, step: int, all_replicas: Callable[[NormMoments], NormMoments]) -> None:
        """Update the running statistics at the end of a step.

        `all_replicas` returns the moments of all replicas for those of this one.
        """
        own: NormMoments = {}
        for number, norm in enumerate(self.modules):
            found = self.moments.get(id(norm.running_mean), [])
            if new := sorted((pair for pair in found if pair[0][0] == step), key=_when):
                own[number] = [(microbatch, moments) for (_, microbatch), moments in new]
                found[:] = [pair for pair in found if pair[0][0] != step]
        if self.modules:
            for number, moments in all_replicas(own).items():
                update_statistics(self.modules[number], [each for _, each in moments])


def _when(recorded: tuple[tuple[int, int], Moments]) -> tuple[int, int]:
    return recorded[0]


def update_statistics(norm: BatchNormBase, of_microbatches: Sequence[Moments]) -> None:
    """Update the running statistics of a module with a mini-batch, as if it had not been cut."""
    moments = reduce(Moments.merge, of_microbatches)
    count = _count(norm).add_(1)
    factor = norm.momentum if norm.momentum is not None else 1.0 / count.double()
    unbiased = moments.squares / max(1, moments.samples - 1)
    for running, new in ((norm.running_mean, moments.mean), (norm.running_var, unbiased)):
        assert running is not None  # it was tracked
        running.copy_((1 - factor) * running.double() + factor * new)


def batch_norm_with_moments(
    like: Tensor, given: Mapping[str, Any], scratch: set[int] | None = None
) -> tuple[Tensor, Moments]:
    """Normalise a micro-batch, and return its moments; `given` are the parameters of F.batch_norm.

    With momentum 1 its mean and unbiased variance are what running statistics `like` these become.
    To compute them beside it took a ResNet's step a third longer. `scratch` is told which memory
    they are written to.
    """
    mean, variance, x = torch.zeros_like(like), torch.zeros_like(like), given["input"]
    if scratch is not None:
        scratch.update(map(storage_identity, (mean, variance)))
    own = {"running_mean": mean, "running_var": variance, "training": True, "momentum": 1.0}
    result = F.batch_norm(**{**given, **own})
    samples = x.numel() // x.shape[1]
    return result, Moments(samples, mean.double(), variance.double() * (samples - 1))


def _count(norm: BatchNormBase) -> Tensor:
    assert norm.num_batches_tracked is not None  # it is tracked
    return norm.num_batches_tracked


class _WithoutRunningStatistics(FunctionInterceptor):
    """Runs batch norm without its running statistics, and records their buffer and the moments."""

    def __init__(self, record: Callable[[Tensor, Moments], None] | None, scratch: set[int]) -> None:
        super().__init__()
        self.record, self.scratch = record, scratch

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is not F.batch_norm:
            return func(*args, **kwargs)
        given = dict(zip(PARAMETERS, args, strict=False)) | kwargs
        running = given["running_mean"]
        if not given.get("training", False) or running is None:
            return func(*args, **kwargs)
        result, moments = batch_norm_with_moments(running, given, self.scratch)
        if self.record is not None:  # it is no recomputation, whose graph saves the same tensors
            self.record(running, moments)
        return result
