"""sl.estimate: estimate a profile from shapes alone, for models that fit on no device.

Nothing is computed. Layers run on fake tensors without data, with the CPU as their device, so that
they take its kernels: its attention saves as little as a GPU's, where the meta device's would save
all scores. An operator takes as long as its FLOPs or its bytes at a device's rates, whichever takes
longer.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from stageline.arguments import renamed_argument
from stageline.errors import PlanError, StageError
from stageline.model import trees
from stageline.model.layers import LayerSequence
from stageline.planning.profiling.activation_memory import measure_activation_bytes
from stageline.planning.profiling.build_measurement import (
    LayerTimes,
    build_measurement,
    tied_parameters,
)
from stageline.planning.profiling.layer_runner import LayerRunner
from stageline.planning.profiling.measure_rates import DeviceRates
from stageline.planning.profiling.profile_result import Profile
from stageline.planning.profiling.profiled_model import LossFunction, Model, ProfiledModel
from stageline.planning.profiling.roofline import RooflineTimer
from stageline.torch_private import BatchNormBase, DataDependentOutputException, FakeTensorMode


@renamed_argument(sample="example_inputs")
def estimate(
    model: Model,
    example_inputs: Any,
    *,
    flops: float,
    bandwidth: float,
    loss_fn: LossFunction | None = None,
    target: Any = None,
    sizes: Sequence[int] | None = None,
) -> Profile:
    """Estimate the time and memory of each layer on a device with these rates, per second.

    The model, `example_inputs` and `target` may be on the meta device: only shapes are used. The
    other arguments are those of `profile`. Rates that a device reaches in practice, as
    `measure_rates()` finds them, give better estimates than its data sheet.

    >>> with torch.device("meta"):
    ...     model = nn.Sequential(nn.Linear(4096, 4096), nn.ReLU())
    ...     example = torch.empty(1024, 4096)
    >>> linear, relu = estimate(model, example, flops=1e14, bandwidth=1e12).at(1024).layers
    >>> round(linear.forward * 1e6), round(relu.forward * 1e6), relu.activation
    (344, 34, 16777216.0)
    """
    rates = DeviceRates(flops, bandwidth)
    _check(rates)
    profiled = ProfiledModel.of(model, example_inputs, loss_fn, target)
    measurements = []
    with FakeTensorMode(allow_non_fake_inputs=True), _data_dependence_explained():
        profiled = profiled._replace(
            layers=_layers_without_data(profiled.layers),
            inputs=trees.map_leaves(_without_data, profiled.inputs),
            target=trees.map_leaves(_without_data, profiled.target),
        )
        for size in profiled.microbatch_sizes(sizes):
            runner = profiled.runner(size)
            memory = measure_activation_bytes(runner)
            times = [_layer_times(runner, n, rates) for n in range(len(profiled.layers))]
            measurements.append(build_measurement(size, runner, times, memory))
    device = f"{flops:.3g} FLOP/s and {bandwidth:.3g} bytes/s, estimated"
    return Profile(profiled.names, tuple(measurements), tied_parameters(runner), device)


@contextmanager
def _data_dependence_explained() -> Iterator[None]:
    """Turn the error of a layer that needs the data of a tensor into a `PlanError`."""
    try:
        yield
    except StageError as error:
        if not isinstance(error.__cause__, DataDependentOutputException):
            raise
        raise PlanError(
            f"{error}\n  the layer reads the data of a tensor, but an estimate has only shapes: "
            "use profile(), if need be on a model with fewer such layers"
        ) from error


def _check(rates: DeviceRates) -> None:
    for name, rate in rates._asdict().items():
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate < math.inf:
            raise PlanError(
                f"{name} is {rate!r}, but has to be a number above 0, per second, such as 1e12"
            )


def _layer_times(runner: LayerRunner, number: int, rates: DeviceRates) -> LayerTimes:
    """Return the times of a second run, which adds its gradients to those of the first."""
    for _ in range(2):
        with RooflineTimer(rates) as forward:
            run = runner.forward(number, in_halves=True)
        gradients = runner.output_gradients(run)
        with RooflineTimer(rates) as input_grad:
            runner.backward(run, gradients)
        with RooflineTimer(rates) as weight_grad:
            runner.weight_gradients(run)
    kept = runner.keep_results(number)
    with RooflineTimer(rates) as again:
        runner.recompute(kept)
    runner.zero_grad(number)
    times = LayerTimes(forward.seconds, input_grad.seconds, weight_grad.seconds)
    return times._replace(saved=max(0.0, forward.seconds - again.seconds))


def _layers_without_data(layers: LayerSequence) -> LayerSequence:
    """Copy layers with fake tensors in place of weights; tied weights stay tied."""
    tensors = [*layers.modules.parameters(), *layers.modules.buffers()]
    memo = {id(tensor): _without_data(tensor) for tensor in tensors}
    modules = copy.deepcopy(layers.modules, memo)
    for part in modules.modules():
        if isinstance(part, BatchNormBase) and part.momentum is None:
            part.momentum = 0.1  # without one it reads the number of batches so far
    return layers.with_modules(modules)


def _without_data(item: Any) -> Any:
    """Return a fake tensor like a tensor; call it within a `FakeTensorMode`."""
    if not isinstance(item, Tensor):
        return item
    empty = torch.empty_strided(item.shape, item.stride(), dtype=item.dtype, device="cpu")
    if isinstance(item, nn.Parameter):
        return nn.Parameter(empty, requires_grad=item.requires_grad)
    return empty.requires_grad_(item.requires_grad)
