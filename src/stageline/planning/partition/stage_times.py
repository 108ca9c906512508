"""Compute the time of each of a stage's actions from those of its layers."""

from __future__ import annotations

from typing import NamedTuple

from stageline.planning.profiling.profile_result import Measurement

LAYER_TIMES = (
    "forward",
    "input_grad",
    "weight_grad",
    "halving",
    "halving_input",
    "halving_weight",
)


class StageTimes(NamedTuple):
    """Seconds of a stage's actions for one micro-batch; B takes input_grad + weight_grad."""

    forward: float
    input_grad: float
    weight_grad: float
    recompute: float  # what a second forward would take: nothing is intercepted in it


def stage_times(measurement: Measurement, layers: range, *, in_halves: bool) -> StageTimes:
    """Return the times of a run of layers as one stage; `in_halves` if it has I and W, not B.

    They are the sums over its layers, each of which includes an overhead that a stage has once.

    >>> from stageline.planning.profiling.profile_result import LayerCost
    >>> from stageline.planning.profiling.trial.stage_overheads import ActionOverheads
    >>> layers = (LayerCost(1, 1, 3, 0, 0, 0, 0),) * 3
    >>> measurement = Measurement(1, layers, (), ActionOverheads(forward=0.25, backward=1.0))
    >>> stage_times(measurement, range(3), in_halves=False)
    StageTimes(forward=2.5, input_grad=2.5, weight_grad=7.5, recompute=2.5)
    """

    def joined(total: float, action: str) -> float:
        """Count the overhead once; a stage takes no less than one of its layers in the mean."""
        overhead: float = getattr(measurement.overheads, action)
        return max(0.0, total / len(layers), total - (len(layers) - 1) * overhead)

    forward, input_grad, weight_grad, halving, halving_input, halving_weight = (
        measurement.sum_over(layers, name) for name in LAYER_TIMES
    )
    recompute = joined(forward, "forward")
    if in_halves:
        in_forward = halving - halving_input - halving_weight
        return StageTimes(
            joined(forward + in_forward, "forward_in_halves"),
            joined(input_grad + halving_input, "input_grad"),
            joined(weight_grad + halving_weight, "weight_grad"),
            recompute,
        )
    backward = input_grad + weight_grad
    scale = joined(backward, "backward") / backward if backward else 1.0
    return StageTimes(recompute, scale * input_grad, scale * weight_grad, recompute)
