"""Choose the number of layers of each stage such that the slowest rank is as fast as possible.

    stages and ranks           file                            result
    one stage per rank         one_stage_per_rank.py           optimal
    two stages per rank        two_stages_per_rank.py          optimal, up to some hundred layers
    several stages per rank    several_stages_per_rank.py      optimal if few cuts, or near a bound
    several ranks per stage    stage_replicas.py               for asynchronous schedules
    a graph of layers          pipedream.py                    PipeDream's own optimizer

`sl.Pipeline` without a plan or balance has no profile to cut by: `model/split.py` cuts by FLOPs and
numbers of parameters.
"""

from __future__ import annotations

from collections.abc import Sequence

from stageline.errors import PlanError
from stageline.planning.partition.one_stage_per_rank import (
    balance_of,
    best_boundaries,
    least_variance_boundaries,
    split_layers,
)
from stageline.planning.partition.prefix_costs import prefix_costs
from stageline.planning.partition.several_stages_per_rank import (
    RankFits,
    split_into_chunks,
)
from stageline.planning.profiling.profile_result import LayerCost, Measurement
from stageline.schedules.placement import Placement

STATE_COPIES = 4  # of each parameter: itself, its gradient and Adam's two moments


def partition_layers(
    costs: Sequence[float],
    placement: Placement,
    speeds: Sequence[float],
    fits: RankFits | None = None,
) -> tuple[int, ...]:
    """Return the number of layers of each stage of a placement; `speeds` are those of the ranks.

    `fits(runs, rank)` says whether a rank has enough memory for these runs of layers.

    >>> partition_layers([1, 1, 1, 1], (0, 1), speeds=[3, 1])
    (3, 1)
    >>> partition_layers([1, 1, 1, 1], (0, 1, 1, 0), speeds=[1, 1])
    (1, 1, 1, 1)
    """
    if len(placement) > len(speeds):
        found = split_into_chunks(costs, placement, speeds=speeds, fits=fits)
        return found.balance

    def stage_fits(start: int, stop: int, stage: int) -> bool:
        return fits is None or fits(((start, stop),), placement[stage])

    by_stage = [speeds[rank] for rank in placement]
    return split_layers(costs, len(placement), speeds=by_stage, fits=stage_fits if fits else None)


def balance_by_rule(rule: str, measurement: Measurement, num_stages: int) -> tuple[int, ...]:
    """Return a balance by a rule that ignores transfers and memory limits.

    "time" minimizes the time of the slowest stage. "size" minimizes the bytes of the largest stage:
    activations and parameters with their gradients and Adam's state. "variance" minimizes the
    variance of the stages' times, which is the goal of GPipe's own partitioner.
    """
    if rule not in RULES:
        raise PlanError(f"the rule is {rule!r}, but has to be one of {', '.join(RULES)}")
    costs = prefix_costs([RULES[rule](layer) for layer in measurement.layers], num_stages)
    boundaries = best_boundaries(costs)
    if rule == "variance":
        boundaries = least_variance_boundaries(costs, boundaries)
    return balance_of(boundaries)


def _time(layer: LayerCost) -> float:
    return layer.time


def _size(layer: LayerCost) -> float:
    return layer.activation + STATE_COPIES * layer.parameters


RULES = {"time": _time, "size": _size, "variance": _time}
