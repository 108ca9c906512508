"""sl.profile: measure the time and memory of each layer by running it as a stage of its own.

For each micro-batch size, times are medians over some rounds through all sizes and layers. Each
layer runs in both ways that schedules use:

    F ─► B             as in most schedules
    F ─► I ─► W        with the backward in halves; this F takes longer

With `ranks` above 1, as many threads run copies of the model at the same time, so that times
contain the contention for cores and memory; and in each round one of the copies runs as a pipeline
too (`trial_pipeline.py`). A layer alone has the overhead of a stage, 0.1 ms here, so that a sum
over layers is too long by that for each but one of them: by 5 to 10 % of a forward of seven layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor, nn

from stageline.arguments import check_size, renamed_argument
from stageline.errors import PlanError
from stageline.limits import MOST_PROCESSES, check_most
from stageline.model.device_settings import preserved_generators
from stageline.planning.console import progress_bar
from stageline.planning.partition.partition import partition_layers
from stageline.planning.profiling.activation_memory import measure_activation_bytes
from stageline.planning.profiling.build_measurement import (
    LayerTimes,
    build_measurement,
    tied_parameters,
)
from stageline.planning.profiling.layer_runner import LayerRunner
from stageline.planning.profiling.profile_result import Profile
from stageline.planning.profiling.profiled_model import LossFunction, Model, ProfiledModel
from stageline.planning.profiling.time_layers import ActionSeconds, run_round
from stageline.planning.profiling.trial.calibrate import calibrate
from stageline.planning.profiling.trial.stage_overheads import NO_HOST_COSTS, ActionOverheads
from stageline.planning.profiling.trial.trial_pipeline import (
    Trial,
    TrialPipeline,
    TrialStep,
    host_costs,
)
from stageline.runtime.accelerators.measured_devices import device_name
from stageline.runtime.parity.plain_loop import preserved_model

WARM_UP_ROUNDS = 2  # not counted: memory is newly allocated, and the runtime observes layers


@renamed_argument(sample="example_inputs")
def profile(
    model: Model,
    example_inputs: Any,
    *,
    loss_fn: LossFunction | None = None,
    target: Any = None,
    sizes: Sequence[int] | None = None,
    repeats: int = 7,
    ranks: int = 1,
    progress: bool = True,
) -> Profile:
    """Measure the time and memory of each layer of a model, on the device that it is on.

    `example_inputs` is a batch of inputs as `Pipeline.step` takes it, and `target` belongs to it.
    With a `loss_fn`, the loss is part of the last layer. `sizes` are numbers of samples per
    micro-batch, by default a quarter, a half and all of the example; for larger ones the example is
    repeated. If several `ranks` will share the cores of this machine, as many run concurrently, on
    copies of the model. An accelerator is timed by its events. The model itself is left unchanged.

    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    >>> found = profile(model, torch.ones(8, 4))
    >>> found.names, [each.samples for each in found.measurements]
    (('0', '1', '2'), [2, 4, 8])
    >>> [layer.activation for layer in found.at(16).layers]  # what the ReLU writes: 16 × 8 floats
    [0.0, 512.0, 0.0]
    """
    profiled = ProfiledModel.of(model, example_inputs, loss_fn, target)
    _check(profiled, repeats, ranks)
    all_sizes = profiled.microbatch_sizes(sizes)
    copies = [profiled._replace(layers=profiled.layers.copy()) for _ in range(ranks - 1)]
    num_rounds = len(all_sizes) * (WARM_UP_ROUNDS + repeats)
    with (
        preserved_model(profiled.layers),
        preserved_generators(),
        progress_bar(num_rounds, "rounds", enabled=progress) as begin,
    ):
        runners = [profiled.runner(size) for size in all_sizes]
        memory = [measure_activation_bytes(runner) for runner in runners]
        rounds, trial = _run_rounds(runners, copies, all_sizes, repeats, begin)
        by_size = [[*zip(*rows, strict=True)] for rows in zip(*rounds, strict=True)]
        overheads = [ActionOverheads(*_usual(rows[-1])[:-1]) for rows in by_size]
        times = [
            _layer_times(rows, *(trial.near(size) if trial else ((), ())))
            for size, rows in zip(all_sizes, by_size, strict=True)
        ]
        measurements = tuple(map(build_measurement, all_sizes, runners, times, memory, overheads))
    host = host_costs(trial.steps) if trial else NO_HOST_COSTS
    name = _device_name(profiled.device, ranks)
    return Profile(profiled.names, measurements, tied_parameters(runners[0]), name, host)


def _run_rounds(
    runners: Sequence[LayerRunner],
    copies: Sequence[ProfiledModel],
    sizes: Sequence[int],
    repeats: int,
    begin: Callable[[], None],
) -> tuple[list[list[list[ActionSeconds]]], Trial | None]:
    """Return the times by round, size and layer, and the trial, which ran in the same rounds."""
    others = [[_with_values(each.runner(size)) for each in copies] for size in sizes]
    empty = _with_values(_without_work(runners[0].device).runner(1))
    warm_up = [run_round(runners, others, empty, begin) for _ in range(WARM_UP_ROUNDS)]
    rounds = []
    with _trial(copies, warm_up[-1][-1][:-1], sizes) as trial:
        for _ in range(repeats):
            rounds.append(run_round(runners, others, empty, begin))
            if trial:
                trial.run_round()
    return rounds, trial


def _check(profiled: ProfiledModel, repeats: int, ranks: int) -> None:
    for name, count in (("repeats", repeats), ("ranks", ranks)):
        check_size(name, count, error=PlanError)
        check_most(name, count, MOST_PROCESSES, error=PlanError)
    if ranks > 1 and profiled.device is not None:
        raise PlanError(
            f"ranks is {ranks}, but the model is on {profiled.device}, and ranks with a device "
            "each do not slow each other down: omit ranks"
        )
    for layer in profiled.layers:
        if any(tensor.is_meta for tensor in layer.module.parameters()):
            raise PlanError(
                f"layer {layer.name!r} is on the meta device, but profile has to run it: build the "
                "model on a device, or use estimate(), which needs only shapes"
            )


def _without_work(device: torch.device | None) -> ProfiledModel:
    """Return a model whose last layer does nothing; the first makes its input need a gradient."""
    layers = [nn.Linear(1, 1, device=device), Unchanged()]
    return ProfiledModel.of(layers, torch.ones(1, 1, device=device), None, None)


class Unchanged(nn.Module):
    """A layer that returns its input as a new tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view_as(x)


def _with_values(runner: LayerRunner) -> LayerRunner:
    runner.run_all()
    return runner


@contextmanager
def _trial(
    copies: Sequence[ProfiledModel], times: Sequence[ActionSeconds], sizes: Sequence[int]
) -> Iterator[Trial | None]:
    """Open a trial with a rank for each model, cut evenly; None without a loss or enough layers.

    It has only the sizes of which the example holds one micro-batch for each rank, so that it needs
    no more memory than a step on the example.
    """
    ranks = len(copies) + 1
    if not copies or copies[0].loss_fn is None or len(times) < ranks:
        yield None
        return
    costs = [seconds.forward + seconds.backward for seconds in times]
    balance = partition_layers(costs, tuple(range(ranks)), [1.0] * ranks)
    num_samples = copies[0].num_samples
    chosen = [size for size in sizes if ranks * size <= num_samples] or sizes[:1]
    trial = Trial(TrialPipeline(copies[0], balance), chosen)
    try:
        for _ in range(WARM_UP_ROUNDS):
            trial.run_round()
        trial.forget()
        yield trial
    finally:
        trial.pipeline.close()


def _usual(rounds: Sequence[ActionSeconds]) -> ActionSeconds:
    """Return the median time of each action."""
    return ActionSeconds(*(median(column) for column in zip(*rounds, strict=True)))


def _layer_times(
    rounds: Sequence[Sequence[ActionSeconds]],
    stages: Sequence[range],
    trial: Sequence[Sequence[TrialStep]],
) -> list[LayerTimes]:
    """Return the times of each layer from its rounds, and from those of the trial's stages."""
    *layers, overhead = map(_usual, rounds)
    found = calibrate(layers, overhead, stages, trial)
    return [_times(usual, each) for usual, each in zip(found, rounds, strict=False)]


def _times(usual: ActionSeconds, rounds: Sequence[ActionSeconds]) -> LayerTimes:
    """Return the times and their spread; B is divided in the ratio of I to W."""
    halves = usual.input_grad + usual.weight_grad
    input_grad = usual.backward * usual.input_grad / halves
    weight_grad = usual.backward * usual.weight_grad / halves
    return LayerTimes(
        usual.forward,
        input_grad,
        weight_grad,
        max(0.0, usual.forward_in_halves + halves - usual.forward - usual.backward),
        _spread([seconds.forward + seconds.backward for seconds in rounds]),
        usual.input_grad - input_grad,
        usual.weight_grad - weight_grad,
        max(0.0, usual.saved),
    )


def _spread(times: Sequence[float]) -> float:
    """Return half of the interquartile range.

    >>> _spread([10.0, 11.0, 12.0, 13.0, 90.0])
    1.0
    """
    if len(times) < 2:
        return 0.0
    low, _, high = quantiles(times, n=4, method="inclusive")
    return (high - low) / 2


def _device_name(device: torch.device | None, ranks: int) -> str:
    if device is not None:
        return device_name(device)
    return f"cpu, {ranks} ranks at once, {torch.get_num_threads()} threads each"
