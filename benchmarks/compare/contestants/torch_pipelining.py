"""torch.distributed.pipelining, every schedule that it has, over gloo.

Set up as its documentation advises: a `PipelineStage` for each stage of this rank, inputs at the
first stage, further inputs as keywords on all ranks, targets at the last stage. Where it leaves a
choice, the faster one: outputs are not joined (`return_outputs=False`), and the loss is divided by
the number of micro-batches instead of all gradients after each step (`scale_grads=False`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from benchmarks.compare.contestants.contestant import Contestant, rank
from benchmarks.compare.stages import stage_modules
from benchmarks.compare.workloads import Case
from torch import Tensor
from torch.distributed import pipelining

import stageline as sl

TORCH = "torch"


class TorchSchedule(NamedTuple):
    """A schedule of torch, with what it needs to know of stages."""

    build: Any
    num_chunks: int = 1
    is_v: bool = False

    def placement(self, num_ranks: int) -> list[int]:
        """Return the rank of each stage.

        >>> TorchSchedule(None, num_chunks=2, is_v=True).placement(2)
        [0, 1, 1, 0]
        """
        once = list(range(num_ranks))
        return once + once[::-1] if self.is_v else once * self.num_chunks


SCHEDULES = {  # by our names, where we have the same
    "gpipe": TorchSchedule(pipelining.ScheduleGPipe),
    "1f1b": TorchSchedule(pipelining.Schedule1F1B),
    "interleaved_1f1b": TorchSchedule(pipelining.ScheduleInterleaved1F1B, 2),
    "looped_bfs": TorchSchedule(pipelining.ScheduleLoopedBFS, 2),
    "interleaved_zero_bubble": TorchSchedule(pipelining.ScheduleInterleavedZeroBubble, 2),
    "zbv": TorchSchedule(pipelining.ScheduleZBVZeroBubble, 2, is_v=True),
    "dualpipe_v": TorchSchedule(pipelining.ScheduleDualPipeV, 2, is_v=True),
}


class TorchPipeline(NamedTuple):
    """A schedule of torch with the stages of this rank; `layers` are those of these stages."""

    schedule: Any
    stages: list[Any]
    layers: sl.LayerSequence
    inputs: tuple[Tensor, ...]  # of the first stage, or none
    named: dict[str, Tensor]
    target: dict[str, Tensor]  # of the last stage, or none

    def step(self) -> list[Tensor]:
        """Run one mini-batch; return the micro-batches' losses where they are known."""
        losses: list[Tensor] = []
        self.schedule.step(
            *self.inputs, **self.named, **self.target, losses=losses, return_outputs=False
        )
        return losses


def build(
    case: Case, name: str, num_ranks: int, num_microbatches: int, balance: Sequence[int]
) -> TorchPipeline:
    """Make the stages of this rank, and the schedule."""
    kind = SCHEDULES[name]
    placement = kind.placement(num_ranks)
    mine = [stage for stage, home in enumerate(placement) if home == rank()]
    modules = stage_modules(case.layers, case.first_input, balance)
    stages = [
        pipelining.PipelineStage(modules[stage], stage, len(placement), torch.device("cpu"))
        for stage in mine
    ]

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return case.loss_fn(output, target) / num_microbatches

    schedule = kind.build(
        stages if kind.num_chunks > 1 else stages[0],
        num_microbatches,
        loss_fn=loss_fn,
        scale_grads=False,
    )
    first, *named = case.inputs
    return TorchPipeline(
        schedule,
        stages,
        _layers_of(case.layers, balance, mine),
        (case.inputs[first],) if 0 in mine else (),
        {name: case.inputs[name] for name in named},
        {"target": case.target} if len(placement) - 1 in mine else {},
    )


def contestant(pipeline: TorchPipeline, name: str = TORCH) -> Contestant:
    """Return torch's pipeline as one of those that take turns."""
    return Contestant(name, pipeline.layers, pipeline.step, _loss)


def _layers_of(
    layers: sl.LayerSequence, balance: Sequence[int], stages: Sequence[int]
) -> sl.LayerSequence:
    parts = [layers.layers[a:b] for a, b in pairwise(accumulate(balance, initial=0))]
    return sl.LayerSequence(tuple(layer for stage in stages for layer in parts[stage]))


def _loss(losses: list[Tensor]) -> float | None:
    return float(torch.stack(losses).detach().sum()) if losses else None
