"""Asynchronous training on one device: the reference for pipelines that never flush.

A pipeline without flushes computes gradients with weights that are some steps old. The papers say
how old. Here every version of every stage is kept, and each micro-batch runs on these versions:

    micro-batch             0 1 2 3 4 5
    pipedream, stage 0      0 0 0 1 2 3
               stage 1      0 0 1 2 3 4
               stage 2      0 1 2 3 4 5
    vertical_sync           0 0 0 1 2 3      on every stage
    pipedream_2bw           0 0 1 2 3 4      on every stage   (3 stages, m = 1)

Version v is the result of v steps of the stage. As in the plain loop there are no schedules and
messages, and only the rule for seeds is shared with the runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from stageline.model.device_settings import preserved_generators
from stageline.model.layers import LayerSequence
from stageline.torch_private import BatchNormBase
from stageline.zoo.plain import Batch, add_up, cut, even_sizes, forward, statistics, untie


def train_asynchronously(
    layers: LayerSequence,
    loss_fn: Callable[[Any, Any], Tensor],
    make_optimizer: Callable[[list[nn.Parameter]], Optimizer],
    batches: Iterable[Batch],
    *,
    balance: Sequence[int],
    num_microbatches: int,
    rule: str,
    replicas: Sequence[int] | None = None,
    seed: int = 0,
    make_scheduler: Callable[[Optimizer], LRScheduler] | None = None,
) -> list[float]:
    """Run a step of every stage's optimizer for each batch, and return the losses."""
    replicas = replicas or [1] * len(balance)
    parts = _split(layers, balance)
    stages = [VersionedStage(part, make_optimizer, make_scheduler) for part in parts]
    norms = [part for part in layers.modules.modules() if isinstance(part, BatchNormBase)]
    losses = []
    with preserved_generators():
        for step, (inputs, target) in enumerate(batches):
            sizes = even_sizes(len(target), num_microbatches)
            loss = 0.0
            with statistics(norms):
                pairs = zip(cut(inputs, sizes), cut(target, sizes), strict=True)
                for microbatch, (part, wanted) in enumerate(pairs):
                    # A short batch skips numbers, so that versions do not depend on its length.
                    number = step * num_microbatches + microbatch
                    for i, stage in enumerate(stages):
                        stage.load(version_of(number, i, rule, num_microbatches, replicas))
                        stage.lend_gradients(number % replicas[i])
                    output = forward(layers, part, seed, step, microbatch)
                    share = loss_fn(output, wanted) * (len(wanted) / len(target))
                    share.backward()  # type: ignore[no-untyped-call]  # torch's own
                    loss += float(share.detach())
                    for i, stage in enumerate(stages):
                        stage.take_gradients(number % replicas[i])
            for stage in stages:
                stage.step()
            losses.append(loss)
    return losses


def version_of(
    microbatch: int, stage: int, rule: str, num_microbatches: int, replicas: Sequence[int]
) -> int:
    """Return the version that a micro-batch, counted over all mini-batches, uses on a stage.

    >>> [version_of(k, 0, "pipedream", 2, [1, 1, 1]) for k in range(8)]
    [0, 0, 0, 0, 1, 1, 2, 2]
    """
    match rule:
        case "pipedream":
            return _latest_at_forward(microbatch, num_microbatches, replicas[stage:])
        case "vertical_sync":
            return _latest_at_forward(microbatch, num_microbatches, replicas)
        case "pipedream_2bw":
            return max(0, microbatch // num_microbatches - 1)
    raise ValueError(
        f"the rule is {rule!r}, but has to be 'pipedream', 'vertical_sync' or 'pipedream_2bw'"
    )


def _latest_at_forward(microbatch: int, num_microbatches: int, replicas: Sequence[int]) -> int:
    """Return the latest version of the first of these stages when it runs a forward.

    Its replicas take turns, and each runs `warmup` forwards ahead of its backwards. A replica runs
    the optimizer step of a mini-batch after its last backward of it.
    """
    turn = replicas[0]
    warmup = (sum(replicas) - 1) // turn
    last_backward = microbatch - (warmup + 1) * turn
    if last_backward < 0:
        return 0
    minibatch = last_backward // num_microbatches
    has_more = last_backward + turn < (minibatch + 1) * num_microbatches
    return minibatch if has_more else minibatch + 1


def _split(layers: LayerSequence, balance: Sequence[int]) -> list[LayerSequence]:
    assert sum(balance) == len(layers)
    ends = accumulate(balance)
    pairs = zip(ends, balance, strict=True)
    stages = [LayerSequence(layers.layers[end - length : end]) for end, length in pairs]
    weights = [weight for stage in stages for weight in stage.modules.parameters()]
    assert len(weights) == len(set(weights)), "a weight is tied across stages"
    return stages


class VersionedStage:
    """A stage that keeps all versions of its weights.

    State: the versions, and the gradients of each replica in the current mini-batch.
    """

    def __init__(
        self,
        layers: LayerSequence,
        make_optimizer: Callable[[list[nn.Parameter]], Optimizer],
        make_scheduler: Callable[[Optimizer], LRScheduler] | None,
    ) -> None:
        self.weights = list(layers.modules.parameters())
        self.doubles = untie(layers)
        self.accumulating = [*self.weights, *(double for _, double in self.doubles)]
        self.optimizer = make_optimizer(self.weights)
        self.scheduler = make_scheduler(self.optimizer) if make_scheduler else None
        self.versions = [self._copy()]
        self.sums: dict[int, list[Tensor | None]] = {}  # by replica

    def load(self, version: int) -> None:
        """Set the weights to one of the versions."""
        assert 0 <= version < len(self.versions)
        with torch.no_grad():
            for weight, kept in zip(self.weights, self.versions[version], strict=True):
                weight.copy_(kept)

    def lend_gradients(self, replica: int) -> None:
        """Set the gradients of a replica, so that autograd adds to them in place."""
        self._set_gradients(self.sums.get(replica, [None] * len(self.accumulating)))

    def take_gradients(self, replica: int) -> None:
        """Keep the gradients of a replica."""
        self.sums[replica] = [weight.grad for weight in self.accumulating]

    def step(self) -> None:
        """Update the latest version, whatever versions the gradients were computed with."""
        self.load(len(self.versions) - 1)
        in_order = [self.sums[replica] for replica in sorted(self.sums)]
        self._set_gradients([_total(of_weight) for of_weight in zip(*in_order, strict=True)])
        add_up(self.doubles)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.scheduler:
            self.scheduler.step()
        self.versions.append(self._copy())
        self.sums.clear()

    def _copy(self) -> list[Tensor]:
        return [weight.detach().clone() for weight in self.weights]

    def _set_gradients(self, gradients: list[Tensor | None]) -> None:
        for weight, gradient in zip(self.accumulating, gradients, strict=True):
            weight.grad = gradient


def _total(gradients: Iterable[Tensor | None]) -> Tensor | None:
    """Return the sum of gradients, or None if the weight is frozen."""
    present = [gradient for gradient in gradients if gradient is not None]
    return reduce(torch.add, present) if present else None
