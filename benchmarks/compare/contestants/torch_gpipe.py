"""torchgpipe 0.0.7: one process, a CPU device for each stage, without recomputation.

Partitions hand tuples of tensors on, so values that skip a partition go through it, as they do for
torch.distributed.pipelining. The loss is that of the whole mini-batch, as in its documentation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.compare.contestants.contestant import Contestant, nothing, rank
from benchmarks.compare.stages import stage_modules
from benchmarks.compare.workloads import Case
from torch import Tensor, nn

TORCHGPIPE = "torchgpipe"


class Partition(nn.Module):
    """A stage that takes one tensor or a tuple: its values, then the model's further inputs."""

    def __init__(self, stage: nn.Module, named: Sequence[str], *, is_last: bool) -> None:
        super().__init__()
        self.stage, self.named, self.is_last = stage, tuple(named), is_last

    def forward(self, given: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        values = given if isinstance(given, tuple) else (given,)
        count = len(values) - len(self.named)
        inputs = dict(zip(self.named, values[count:], strict=True))
        result = self.stage(*values[:count], **inputs)
        if self.is_last or not self.named:
            last: Tensor | tuple[Tensor, ...] = result
            return last
        return (*(result if isinstance(result, tuple) else (result,)), *inputs.values())


def contestant(case: Case, num_microbatches: int, balance: Sequence[int]) -> Contestant:
    """Return torchgpipe's pipeline, which only the first process runs."""
    if rank() != 0:
        return Contestant(TORCHGPIPE, case.layers, nothing)
    from torchgpipe import GPipe  # noqa: PLC0415  the other processes do not need it

    first, *named = case.inputs
    modules = stage_modules(case.layers, first, balance)
    parts = [Partition(each, named, is_last=each is modules[-1]) for each in modules]
    pipe: Any = GPipe(
        nn.Sequential(*parts),
        balance=[1] * len(parts),
        devices=["cpu"] * len(parts),
        chunks=num_microbatches,
        checkpoint="never",
    )
    given = tuple(case.inputs.values()) if named else case.inputs[first]

    def step() -> float:
        loss = case.loss_fn(pipe(given), case.target)
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own
        return float(loss.detach())

    return Contestant(TORCHGPIPE, case.layers, step, lambda loss: loss)
