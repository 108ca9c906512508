"""sl.profile: measure the time and memory of each layer by running it as a stage of its own.

For each micro-batch size, times are medians over some rounds through all sizes and layers. Each
layer runs in both ways that schedules use:

    F ─► B             as in most schedules
    F ─► I ─► W        with the backward in halves; this F takes longer

With `ranks` above 1, as many threads run copies of the model at the same time, so that times
contain the contention for cores and memory. Each time contains the overhead of a stage, 30 µs here.
A stage has it once, so a sum over layers is too long by that for each layer beyond the first: less
than 5 % for the demo's GPT.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from statistics import median, quantiles
from threading import Event
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

import torch

from stageline.arguments import check_size, renamed_argument
from stageline.errors import PlanError
from stageline.limits import MOST_PROCESSES, check_most
from stageline.model.layers import LayerSequence
from stageline.planning.console import progress_bar
from stageline.planning.profiling.activation_memory import measure_activation_bytes
from stageline.planning.profiling.build_measurement import (
    LayerTimes,
    build_measurement,
    tied_parameters,
)
from stageline.planning.profiling.layer_runner import LayerRunner
from stageline.planning.profiling.profile_result import Profile
from stageline.planning.profiling.profiled_model import LossFunction, Model, ProfiledModel
from stageline.runtime.parity.plain_loop import preserved_model

T = TypeVar("T")
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
    copies of the model. The model itself is left unchanged.

    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    >>> found = profile(model, torch.ones(8, 4))
    >>> found.names, [each.samples for each in found.measurements]
    (('0', '1', '2'), [2, 4, 8])
    >>> [layer.activation for layer in found.at(16).layers]  # what the ReLU writes: 16 × 8 floats
    [0.0, 512.0, 0.0]
    """
    profiled = ProfiledModel.of(model, example_inputs, loss_fn, target)
    _check(profiled.layers, repeats, ranks)
    microbatch_sizes = profiled.microbatch_sizes(sizes)
    copies = [profiled._replace(layers=profiled.layers.copy()) for _ in range(ranks - 1)]
    num_rounds = WARM_UP_ROUNDS + repeats
    with (
        preserved_model(profiled.layers),
        torch.random.fork_rng(devices=[]),
        progress_bar(len(microbatch_sizes) * num_rounds, "rounds", enabled=progress) as begin,
    ):
        runners = [profiled.runner(size) for size in microbatch_sizes]
        memory = [measure_activation_bytes(runner) for runner in runners]
        others = [[_with_values(each.runner(size)) for each in copies] for size in microbatch_sizes]
        rounds = [_run_round(runners, others, begin) for _ in range(num_rounds)][WARM_UP_ROUNDS:]
        by_size = zip(*rounds, strict=True)
        times = [[_median_times(column) for column in zip(*rows, strict=True)] for rows in by_size]
        measurements = tuple(map(build_measurement, microbatch_sizes, runners, times, memory))
    device = _device_name(profiled.layers, ranks)
    return Profile(profiled.names, measurements, tied_parameters(runners[0]), device)


def _check(layers: LayerSequence, repeats: int, ranks: int) -> None:
    for name, count in (("repeats", repeats), ("ranks", ranks)):
        check_size(name, count, error=PlanError)
        check_most(name, count, MOST_PROCESSES, error=PlanError)
    for layer in layers:
        if any(tensor.is_meta for tensor in layer.module.parameters()):
            raise PlanError(
                f"layer {layer.name!r} is on the meta device, but profile has to run it: build the "
                "model on a device, or use estimate(), which needs only shapes"
            )


class ActionSeconds(NamedTuple):
    """The times of one layer's actions in one round."""

    forward: float
    backward: float
    forward_in_halves: float
    input_grad: float
    weight_grad: float


def _run_round(
    runners: Sequence[LayerRunner],
    others: Sequence[Sequence[LayerRunner]],
    begin: Callable[[], None],
) -> list[list[ActionSeconds]]:
    """Run all layers once for every size, so that a temporary slowdown affects all of them."""
    times = []
    for runner, concurrent in zip(runners, others, strict=True):
        begin()
        with _running_concurrently(concurrent):
            times.append([_time_actions(runner, number) for number in range(len(runner.layers))])
    return times


def _with_values(runner: LayerRunner) -> LayerRunner:
    runner.run_all()
    return runner


def _median_times(rounds: Sequence[ActionSeconds]) -> LayerTimes:
    """Return the medians and their spread; B is divided in the ratio of I to W."""
    usual = ActionSeconds(*(median(column) for column in zip(*rounds, strict=True)))
    halves = usual.input_grad + usual.weight_grad
    longer = usual.forward_in_halves + halves - usual.forward - usual.backward
    return LayerTimes(
        usual.forward,
        usual.backward * usual.input_grad / halves,
        usual.backward * usual.weight_grad / halves,
        max(0.0, longer),
        _spread([seconds.forward + seconds.backward for seconds in rounds]),
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


def _time_actions(runner: LayerRunner, number: int) -> ActionSeconds:
    """Time a layer in both ways, one after the other, so that other load affects both alike."""
    whole, forward = _timed(lambda: runner.forward(number, in_halves=False))
    gradients = runner.output_gradients(whole)
    _, backward = _timed(lambda: runner.backward(whole, gradients))
    halves, forward_in_halves = _timed(lambda: runner.forward(number, in_halves=True))
    gradients = runner.output_gradients(halves)
    _, input_grad = _timed(lambda: runner.backward(halves, gradients))
    _, weight_grad = _timed(lambda: runner.weight_gradients(halves))
    return ActionSeconds(forward, backward, forward_in_halves, input_grad, weight_grad)


def _timed(work: Callable[[], T]) -> tuple[T, float]:
    """Return a result and its time, including work queued on a GPU (untested on hardware)."""
    start = perf_counter()
    result = work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return result, perf_counter() - start


@contextmanager
def _running_concurrently(runners: Sequence[LayerRunner]) -> Iterator[None]:
    """Run the layers of other models in threads meanwhile, each starting at a different layer."""
    num_threads, is_over = torch.get_num_threads(), Event()

    def work(rank: int, runner: LayerRunner) -> None:
        torch.set_num_threads(num_threads)  # OpenMP has a setting for each thread
        count = len(runner.layers)
        for turn in itertools.count(count * rank // (len(runners) + 1)):
            if is_over.is_set():
                return
            _time_actions(runner, turn % count)

    with ThreadPoolExecutor(max(1, len(runners)), thread_name_prefix="stageline-profile") as pool:
        futures = [pool.submit(work, rank, runner) for rank, runner in enumerate(runners, start=1)]
        try:
            yield
        finally:
            is_over.set()
    for future in futures:
        future.result()


def _device_name(layers: LayerSequence, ranks: int) -> str:
    weight = next(layers.modules.parameters(), None)
    if weight is not None and weight.is_cuda:
        return torch.cuda.get_device_name(weight.device)
    return f"cpu, {ranks} ranks at once, {torch.get_num_threads()} threads each"
