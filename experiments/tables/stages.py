"""The costs of stages: what `sl.Costs` says of a profile that is cut into stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import stageline as sl
from experiments.tables.workloads import Accelerator

# The update reads weight, gradient and momentum, and writes weight and momentum.
UPDATE_PASSES = 5
MOMENTUM = 1  # states of the optimizer, each as large as the weights
ROOMY = "100TiB"  # memory that leaves the cut to the times alone


def layers_by_stage(balance: Sequence[int]) -> list[range]:
    """Return the layers of each stage.

    >>> layers_by_stage([2, 1])
    [range(0, 2), range(2, 3)]
    """
    return [range(*pair) for pair in pairwise(accumulate(balance, initial=0))]


def cut_by_time(profile: sl.Profile, samples: int, num_ranks: int) -> tuple[int, ...]:
    """Return the balance that a plan has for micro-batches of this size: the slowest is fastest."""
    one_size = replace(profile, measurements=(profile.at(samples),))
    cluster = sl.Cluster(num_devices=num_ranks, memory=ROOMY)
    sizes: dict[str, Any] = {"batch_size": samples, "num_ranks": num_ranks}
    return sl.plan(one_size, cluster, **sizes, schedules=["gpipe"]).balance


def cut_by_parameters(profile: sl.Profile, samples: int, num_ranks: int) -> tuple[int, ...]:
    """Return the balance of a planner who takes the number of parameters for the time."""
    measurement = profile.at(samples)
    layers = tuple(
        replace(layer, forward=layer.parameters, input_grad=0.0, weight_grad=0.0)
        for layer in measurement.layers
    )
    by_size = replace(profile, measurements=(replace(measurement, layers=layers),))
    return cut_by_time(by_size, samples, num_ranks)


def stage_costs(
    profile: sl.Profile, samples: int, balance: Sequence[int], device: Accelerator
) -> sl.Costs:
    """Return the costs of stages that are all recomputed, in seconds and bytes."""
    measurement, stages = profile.at(samples), layers_by_stage(balance)

    def sums(name: str) -> list[float]:
        return [measurement.sum_over(layers, name) for layers in stages]

    messages = [crossing_bytes(profile, samples, layers.stop) for layers in stages]
    parameters = sums("parameters")
    return sl.Costs(
        forward=sums("forward"),
        input_grad=sums("input_grad"),
        weight_grad=sums("weight_grad"),
        recompute=sums("forward"),
        message=messages,
        links=sl.Link(bandwidth=device.link),
        step=[UPDATE_PASSES * size / device.bandwidth for size in parameters],
        activation=[0.0, *messages[:-1]],  # what a stage reads is kept for its second forward
        working_set=sums("activation"),
        parameters=parameters,
        gradients=parameters,
        optimizer_state=[MOMENTUM * size for size in parameters],
    )


def crossing_bytes(profile: sl.Profile, samples: int, boundary: int) -> float:
    """Return the bytes that layers from `boundary` on read from layers before it."""
    values = profile.at(samples).values
    return sum(
        value.size
        for value in values
        if 0 <= value.writer < boundary and max(value.readers) >= boundary
    )
