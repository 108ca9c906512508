"""A profile from shapes alone, for models that fit on no device: nothing is computed.

Layers run on tensors without data, which are said to be on the CPU and so take its kernels: its
attention keeps as little as a GPU's does, where that of the meta device would keep all scores. An
operator takes as long as its FLOPs or its bytes at a device's rates, whichever takes longer.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from stageline.errors import PlanError, StageError
from stageline.model.layers import LayerSequence
from stageline.planning.profiling.activations import kept_bytes
from stageline.planning.profiling.assemble import Times, measurement, tied_weights
from stageline.planning.profiling.profile import Profile
from stageline.planning.profiling.rates import Rates
from stageline.planning.profiling.roofline import Roofline
from stageline.planning.profiling.solo import Solo
from stageline.planning.profiling.subject import LossFunction, Model, Subject
from stageline.runtime import trees
from stageline.torch_private import BatchNormBase, DataDependentOutputException, FakeTensorMode


def estimate(
    model: Model,
    sample: Any,
    *,
    flops: float,
    bandwidth: float,
    loss_fn: LossFunction | None = None,
    target: Any = None,
    sizes: Sequence[int] | None = None,
) -> Profile:
    """What each layer of a model would cost on a device with these rates, each by second.

    The model may be on the meta device, and so may `sample` and `target`: only shapes count. All
    else is as `profile` takes it. Rates that a device reaches give better numbers than those on its
    data sheet: `measure_rates()` finds them.

    >>> with torch.device("meta"):
    ...     model = nn.Sequential(nn.Linear(4096, 4096), nn.ReLU())
    ...     sample = torch.empty(1024, 4096)
    >>> linear, relu = estimate(model, sample, flops=1e14, bandwidth=1e12).at(1024).layers
    >>> round(linear.forward * 1e6), round(relu.forward * 1e6), relu.activation
    (344, 34, 16777216.0)
    """
    rates = Rates(flops, bandwidth)
    _check(rates)
    subject = Subject.of(model, sample, loss_fn, target)
    measurements = []
    with FakeTensorMode(allow_non_fake_inputs=True), _data_is_asked_for():
        subject = subject._replace(
            layers=_layers_without_data(subject.layers),
            inputs=trees.map_leaves(_without_data, subject.inputs),
            target=trees.map_leaves(_without_data, subject.target),
        )
        for size in subject.sizes(sizes):
            solo = subject.solo(size)
            kept = kept_bytes(solo)
            times = [_times(solo, number, rates) for number in range(len(subject.layers))]
            measurements.append(measurement(size, solo, times, kept))
    device = f"{flops:.3g} FLOP/s and {bandwidth:.3g} bytes/s, estimated"
    return Profile(subject.names, tuple(measurements), tied_weights(solo), device)


@contextmanager
def _data_is_asked_for() -> Iterator[None]:
    """By a layer that does with a tensor what needs its numbers."""
    try:
        yield
    except StageError as error:
        if not isinstance(error.__cause__, DataDependentOutputException):
            raise
        raise PlanError(
            f"{error}\n  it looks at the numbers in a tensor, but an estimate has only shapes: let "
            "profile() run the model, or one with fewer such layers"
        ) from error


def _check(rates: Rates) -> None:
    for name, rate in rates._asdict().items():
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate < math.inf:
            raise PlanError(
                f"{name} is {rate!r}, but has to be a number above 0, by second, such as 1e12"
            )


def _times(solo: Solo, number: int, rates: Rates) -> Times:
    """Of a second run, whose gradients are added to those of the first."""
    for _ in range(2):
        with Roofline(rates) as forward:
            run = solo.forward(number, in_halves=True)
        gradients = solo.ones(run)
        with Roofline(rates) as input_grad:
            solo.backward(run, gradients)
        with Roofline(rates) as weight_grad:
            solo.weight_gradients(run)
    solo.forget_gradients(number)
    return Times(forward.seconds, input_grad.seconds, weight_grad.seconds)


def _layers_without_data(layers: LayerSequence) -> LayerSequence:
    """Weights that layers share stay shared."""
    tensors = [*layers.modules.parameters(), *layers.modules.buffers()]
    memo = {id(tensor): _without_data(tensor) for tensor in tensors}
    modules = copy.deepcopy(layers.modules, memo)
    for part in modules.modules():
        if isinstance(part, BatchNormBase) and part.momentum is None:
            part.momentum = 0.1  # without one it asks how many batches it has seen
    pairs = zip(layers, modules, strict=True)
    return LayerSequence(tuple(replace(layer, module=module) for layer, module in pairs))


def _without_data(item: Any) -> Any:
    """Within a FakeTensorMode, where new tensors have none."""
    if not isinstance(item, Tensor):
        return item
    empty = torch.empty_strided(item.shape, item.stride(), dtype=item.dtype, device="cpu")
    if isinstance(item, nn.Parameter):
        return nn.Parameter(empty, requires_grad=item.requires_grad)
    return empty.requires_grad_(item.requires_grad)
