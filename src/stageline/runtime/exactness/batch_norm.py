"""BatchNorm over micro-batches: each is normalised by itself, running statistics are kept in order.

With "minibatch" the running statistics take in a mini-batch once, as if it had not been cut: what
its micro-batches bring is put together in ascending order. With "microbatch" they take in each
micro-batch, as in a plain loop. A recomputed forward counts in neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  as everybody calls it
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

MODES = ("minibatch", "microbatch")


class Moments(NamedTuple):
    """Samples, their mean and the sum of squared differences from it, by channel, as doubles."""

    samples: int
    mean: Tensor
    squares: Tensor

    @staticmethod
    def of(x: Tensor) -> Moments:
        dims = [dim for dim in range(x.ndim) if dim != 1]
        variance, mean = torch.var_mean(x.detach(), dims, correction=0)
        samples = x.numel() // x.shape[1]
        return Moments(samples, mean.double(), variance.double() * samples)

    def join(self, other: Moments) -> Moments:
        samples = self.samples + other.samples
        apart = other.mean - self.mean
        mean = self.mean + apart * (other.samples / samples)
        weight = self.samples * other.samples / samples
        return Moments(samples, mean, self.squares + other.squares + apart.square() * weight)


# By number of the module, in the order of micro-batches, whose numbers they are.
Seen = dict[int, list[tuple[int, Moments]]]


@dataclass
class Statistics:
    """The running statistics of one stage. State: what the micro-batches of a step brought."""

    modules: list[_BatchNorm]
    mode: str
    # by id of the buffer, and by step and micro-batch
    seen: dict[int, list[tuple[tuple[int, int], Moments]]] = field(default_factory=dict)

    @staticmethod
    def of(modules: Iterable[nn.Module], mode: str) -> Statistics:
        norms = (part for module in modules for part in module.modules())
        return Statistics([n for n in norms if isinstance(n, _BatchNorm)], mode)

    @contextmanager
    def watch(self, step: int, microbatch: int, *, again: bool) -> Iterator[None]:
        """Around a forward; `again` if it is a recomputation."""
        tracked = [norm for norm in self.modules if norm.training and norm.track_running_stats]
        if not tracked or (self.mode == "microbatch" and not again):
            yield
            return
        counts = [_count(norm).clone() for norm in tracked]
        try:
            with _Untracked(self._note((step, microbatch)) if not again else None):
                yield
        finally:
            for norm, count in zip(tracked, counts, strict=True):
                _count(norm).copy_(count)

    def _note(self, when: tuple[int, int]) -> Callable[[Tensor, Tensor], None]:
        def note(running_mean: Tensor, x: Tensor) -> None:
            self.seen.setdefault(id(running_mean), []).append((when, Moments.of(x)))

        return note

    def forget(self, step: int, microbatch: int | None = None) -> None:
        """Forwards that will be run again, of a step or of one micro-batch."""
        for found in self.seen.values():
            found[:] = [
                pair for pair in found if pair[0][0] != step or microbatch not in (None, pair[0][1])
            ]

    def update(self, step: int, of_replicas: Callable[[Seen], Seen]) -> None:
        """At the end of a step: what all replicas saw goes into the running statistics."""
        seen: Seen = {}
        for number, norm in enumerate(self.modules):
            found = self.seen.get(id(norm.running_mean), [])
            if own := sorted((pair for pair in found if pair[0][0] == step), key=_when):
                seen[number] = [(microbatch, moments) for (_, microbatch), moments in own]
                found[:] = [pair for pair in found if pair[0][0] != step]
        if self.modules:
            for number, moments in of_replicas(seen).items():
                _update(self.modules[number], reduce(Moments.join, (each for _, each in moments)))


def _when(noted: tuple[tuple[int, int], Moments]) -> tuple[int, int]:
    return noted[0]


def _update(norm: _BatchNorm, moments: Moments) -> None:
    count = _count(norm).add_(1)
    factor = norm.momentum if norm.momentum is not None else 1.0 / float(count)
    unbiased = moments.squares / max(1, moments.samples - 1)
    for running, new in ((norm.running_mean, moments.mean), (norm.running_var, unbiased)):
        assert running is not None  # it was tracked
        running.copy_((1 - factor) * running.double() + factor * new)


def _count(norm: _BatchNorm) -> Tensor:
    assert norm.num_batches_tracked is not None  # it is tracked
    return norm.num_batches_tracked


class _Untracked(TorchFunctionMode):
    """Batch norm without its running statistics; `note` is told whose, and the input."""

    def __init__(self, note: Callable[[Tensor, Tensor], None] | None) -> None:
        super().__init__()
        self.note = note

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is not F.batch_norm or not _is_training(args, kwargs):
            return func(*args, **kwargs)
        x, running_mean, _, *rest = args
        if self.note and running_mean is not None:
            self.note(running_mean, x)
        return func(x, None, None, *rest, **kwargs)


def _is_training(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return bool(args[5] if len(args) > 5 else kwargs.get("training", False))
