"""Small layers, profiles and clusters for the tests of planning."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from stageline.planning.cluster.cluster import Cluster
from stageline.planning.profiling.profile import profile
from stageline.planning.profiling.profile_result import (
    LayerCost,
    Measurement,
    Profile,
    ValueCost,
)

WIDTH, SAMPLES = 8, 4
TENSOR = SAMPLES * WIDTH * 4  # bytes of the output of a layer for a micro-batch


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def profile_one_size(model: Any, example_inputs: Any = None, **options: Any) -> Measurement:
    """Profile one micro-batch size in one round."""
    inputs = torch.randn(SAMPLES, WIDTH) if example_inputs is None else example_inputs
    return profile(model, inputs, sizes=[SAMPLES], repeats=1, **options).measurements[0]


def memory_of_layers(found: Measurement) -> list[tuple[float, float, float]]:
    """Return the bytes from F until I, the part of them until W, and gradients from I until W."""
    return [(layer.activation, layer.retained, layer.waiting) for layer in found.layers]


def tied_embedding() -> nn.Sequential:
    embedding, head = nn.Embedding(10, WIDTH), nn.Linear(WIDTH, 10, bias=False)
    head.weight = embedding.weight
    return nn.Sequential(embedding, head)


def profile_of(
    times: list[float], *, activation: float = 0.0, parameters: float = 0.0, message: float = 0.0
) -> Profile:
    """Return a profile of layers in a chain; a backward takes twice the time of a forward."""
    costs = tuple(LayerCost(t, t, t, activation, activation, parameters, 0) for t in times)
    values = tuple(ValueCost(n, (n + 1,), message) for n in range(len(times) - 1))
    names = tuple(f"layer{n}" for n in range(len(times)))
    return Profile(names, (Measurement(1, costs, values),))


def cluster_of(num_devices: int, memory: float | str = "1TiB", **options: Any) -> Cluster:
    return Cluster(num_devices=num_devices, memory=memory, **options)
