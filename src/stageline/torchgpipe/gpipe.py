"""GPipe: torchgpipe's interface to a pipeline, on `sl.Pipeline` with one thread per partition."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn

from stageline.errors import BalanceError, ModelError
from stageline.options import Options
from stageline.pipeline import Pipeline
from stageline.torch_private import has_hooks
from stageline.torchgpipe.batchnorm import DeferredBatchNorm
from stageline.torchgpipe.layers import layers_of
from stageline.torchgpipe.partitions import Device, split_module, verify_module
from stageline.torchgpipe.run import Runner
from stageline.torchgpipe.skip.verify import verify_skippables
from stageline.torchgpipe.tensors import Tensors, check_tensors, gather, scatter

__all__ = ["BalanceError", "GPipe", "split_module", "verify_module"]

CHECKPOINT = ("always", "except_last", "never")
MOST_PIPELINES = 4  # of one module; another is needed for other `chunks`, and for evaluation


class GPipe(nn.Module):
    """An `nn.Sequential` that runs as a pipeline: torchgpipe's class, on Stageline's runtime.

    `balance` has the number of layers in each partition, and `devices` at least as many devices, by
    default all CUDA devices. A mini-batch is cut into `chunks` micro-batches. `checkpoint` says of
    which of them activations are recomputed: "always", "except_last" or "never". With
    `deferred_batch_norm`, running statistics take in each mini-batch once.

    State: pipelines for the arguments that were in use so far.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    >>> model = GPipe(model, balance=[2, 1], devices=["cpu", "cpu"], chunks=4)
    >>> model(torch.ones(8, 4)).mean().backward()
    >>> tuple(model[0].weight.grad.shape)
    (8, 4)
    """

    balance: list[int] = []  # noqa: RUF012  torchgpipe's class has these defaults
    devices: list[torch.device] = []  # noqa: RUF012
    chunks: int = 1
    checkpoint: str = "except_last"
    partitions: nn.ModuleList

    def __init__(
        self,
        module: nn.Sequential,
        balance: Iterable[int] | None = None,
        *,
        devices: Iterable[Device] | None = None,
        chunks: int = chunks,
        checkpoint: str = checkpoint,
        deferred_batch_norm: bool = False,
    ) -> None:
        super().__init__()
        self.chunks, self.checkpoint = int(chunks), str(checkpoint)
        if balance is None:
            raise BalanceError(_with_advice("balance is missing, but GPipe does not choose it"))
        self._check_options()
        verify_module(module)
        verify_skippables(module)
        if deferred_batch_norm:
            DeferredBatchNorm.convert_deferred_batch_norm(module, self.chunks)
        given = range(torch.accelerator.device_count()) if devices is None else devices
        places = [*map(torch.device, given)]
        try:
            split = split_module(module, balance, places)
        except BalanceError as error:
            raise BalanceError(_with_advice(str(error))) from None
        self.partitions, self.balance, self.devices = split
        self._runners: dict[object, Runner] = {}

    def _check_options(self) -> None:
        if self.chunks < 1:
            raise ModelError(f"chunks is {self.chunks}, but a mini-batch is cut into 1 at least")
        if self.checkpoint not in CHECKPOINT:
            raise ModelError(
                f"checkpoint is {self.checkpoint!r}, but takes one of "
                f"{', '.join(map(repr, CHECKPOINT))}"
            )

    def __len__(self) -> int:
        return sum(map(len, self._sequences()))

    def __getitem__(self, index: int) -> nn.Module:
        layers: list[nn.Module] = [*self]
        return layers[operator.index(index)]

    def __iter__(self) -> Iterator[nn.Module]:
        """Yield the layers of all partitions."""
        for partition in self._sequences():
            yield from partition

    def forward(self, input: Tensors) -> Tensors:  # noqa: A002  torchgpipe's name
        """Return the output for a mini-batch, as part of the caller's graph.

        Both are a tensor or a tuple of tensors. What a layer raises is raised here.
        """
        check_tensors(input, "input")
        if not self.devices:
            return input  # there are no layers
        return gather(self._runner().run(scatter(input, self.chunks)))

    def _runner(self) -> Runner:
        """Return the runner for the options and layers of this moment."""
        recompute = self.checkpoint if self.training else "never"
        hooked = tuple(map(has_hooks, self.partitions))
        key = (self.chunks, recompute, tuple(self), hooked)
        if key not in self._runners:
            self._check_options()
            while len(self._runners) >= MOST_PIPELINES:
                del self._runners[next(iter(self._runners))]
            self._runners[key] = Runner(self._new_pipeline(recompute))
        return self._runners[key]

    def _new_pipeline(self, recompute: str) -> Pipeline:
        layers, balance = layers_of(self.partitions)
        is_deferred = any(isinstance(part, DeferredBatchNorm) for part in self.modules())
        return Pipeline(
            layers,
            _no_loss,
            num_ranks=len(balance),
            num_microbatches=self.chunks,
            schedule="gpipe",
            balance=balance,
            recompute=recompute,
            devices=self.devices,
            backend="threads",
            options=Options(batch_norm="minibatch" if is_deferred else "microbatch"),
        )

    def cuda(self, device: Any = None) -> Self:  # noqa: ARG002
        _refuse_to_move()

    def cpu(self) -> Self:
        _refuse_to_move()

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Cast parameters and buffers to another data type; another device is refused."""
        names_device = args and isinstance(args[0], torch.device | int | str | Tensor)
        if names_device or "device" in kwargs or "tensor" in kwargs:
            _refuse_to_move()
        super().to(*args, **kwargs)
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Return what is copied or serialized: all but the pipelines, which are made again."""
        return self.__dict__ | {"_runners": {}}

    def _sequences(self) -> Iterator[nn.Sequential]:
        for partition in self.partitions:
            assert isinstance(partition, nn.Sequential)  # split_module made it
            yield partition


def _refuse_to_move() -> NoReturn:
    raise TypeError(
        "a GPipe was asked to move to another device, but its partitions are on the devices that "
        "it was made with: give other devices= to GPipe"
    )


def _no_loss(output: Any, target: Any) -> NoReturn:  # noqa: ARG001
    raise AssertionError  # the caller computes the loss


def _with_advice(message: str) -> str:
    return (
        f"{message}: count the layers of each partition, or measure them with "
        "stageline.torchgpipe.balance.balance_by_time(num_partitions, model, sample)"
    )
