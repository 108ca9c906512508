"""BatchNorm whose running statistics take in each mini-batch once, as if it had not been cut."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn

from stageline.runtime.exactness.batch_norm import (
    Moments,
    batch_norm_with_moments,
    update_statistics,
)
from stageline.runtime.stage.forward_kind import running_forward
from stageline.torch_private import BatchNormBase, child_table

__all__ = ["DeferredBatchNorm"]

M = TypeVar("M", bound=nn.Module)


class DeferredBatchNorm(BatchNormBase):
    """BatchNorm that normalises by micro-batch and updates its statistics once per mini-batch.

    In a pipeline the runtime knows where a mini-batch ends. Elsewhere, every `chunks` calls in
    training are one. The variance is unbiased, as that of `nn.BatchNorm2d`; torchgpipe's is biased.

    State: the moments of the calls since the last update. The buffers `sum` and `sum_squares` stay
    zero; torchgpipe has them, and they are in its checkpoints.
    """

    sum: Tensor
    sum_squares: Tensor

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        chunks: int = 1,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats=True)
        self.register_buffer("sum", torch.zeros(num_features))
        self.register_buffer("sum_squares", torch.zeros(num_features))
        self.chunks = chunks
        self.moments: list[Moments] = []

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  torch's own name for it
        if not self.training or input.is_meta or running_forward() is not None:
            return super().forward(input)
        assert self.running_mean is not None  # it tracks its statistics
        given = {"input": input, "weight": self.weight, "bias": self.bias, "eps": self.eps}
        result, moments = batch_norm_with_moments(self.running_mean, given)
        self.moments.append(moments)
        if len(self.moments) >= self.chunks:
            update_statistics(self, self.moments)
            self.moments = []
        return result

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002  torch's own name for it
        if input.dim() < 2:
            raise ValueError(
                f"the input has {input.dim()} dimensions, but BatchNorm needs samples and channels"
            )

    @classmethod
    def convert_deferred_batch_norm(cls, module: M, chunks: int = 1) -> M | DeferredBatchNorm:
        """Return a module with all BatchNorm that tracks statistics replaced, inside it in place.

        Parameters and buffers are those of the modules that were replaced.
        """
        return cls._converted(module, chunks, {})

    @classmethod
    def _converted(
        cls, module: M, chunks: int, replaced: dict[nn.Module, DeferredBatchNorm]
    ) -> M | DeferredBatchNorm:
        """Convert a module; `replaced` has what was, as a norm may be used in several places."""
        if isinstance(module, DeferredBatchNorm) and module.chunks == chunks:
            return module
        if isinstance(module, BatchNormBase) and module.track_running_stats:
            if module not in replaced:
                replaced[module] = cls._replacing(module, chunks)
            return replaced[module]
        for name, child in [*child_table(module).items()]:  # named_children() drops repeats
            if child is not None:
                module.add_module(name, cls._converted(child, chunks, replaced))
        return module

    @classmethod
    def _replacing(cls, norm: BatchNormBase, chunks: int) -> DeferredBatchNorm:
        new = cls(norm.num_features, norm.eps, norm.momentum, norm.affine, chunks)
        new.train(norm.training)
        if norm.affine:
            new.weight, new.bias = norm.weight, norm.bias
        new.running_mean, new.running_var = norm.running_mean, norm.running_var
        new.num_batches_tracked = norm.num_batches_tracked
        assert norm.running_mean is not None  # it is tracked
        new.sum = torch.zeros_like(norm.running_mean)
        new.sum_squares = torch.zeros_like(norm.running_mean)
        return new
