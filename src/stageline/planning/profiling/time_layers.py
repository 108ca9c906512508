"""Time the actions of each layer, while other threads do the same on copies of the model."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event
from typing import NamedTuple

import torch

from stageline.planning.profiling.layer_runner import LayerRunner
from stageline.runtime.accelerators.measured_devices import timed


class ActionSeconds(NamedTuple):
    """The times of one layer's actions in one round."""

    forward: float
    backward: float
    forward_in_halves: float
    input_grad: float
    weight_grad: float
    saved: float = 0.0  # by keeping results of costly operators for a recomputation


def run_round(
    runners: Sequence[LayerRunner],
    others: Sequence[Sequence[LayerRunner]],
    empty: LayerRunner,
    begin: Callable[[], None],
) -> list[list[ActionSeconds]]:
    """Run all layers once for every size, so that a temporary slowdown affects all of them.

    The last time of each size is that of the last layer of `empty`, which does no work.
    """
    times = []
    for runner, concurrent in zip(runners, others, strict=True):
        begin()
        with _running_concurrently(concurrent):
            found = [_time_actions(runner, number) for number in range(len(runner.layers))]
            times.append([*found, _time_actions(empty, len(empty.layers) - 1)])
    return times


def _time_actions(runner: LayerRunner, number: int) -> ActionSeconds:
    """Time a layer in both ways, one after the other, so that other load affects both alike."""
    device = runner.device
    whole, forward = timed(lambda: runner.forward(number, in_halves=False), device)
    gradients = runner.output_gradients(whole)
    _, backward = timed(lambda: runner.backward(whole, gradients), device)
    halves, forward_in_halves = timed(lambda: runner.forward(number, in_halves=True), device)
    gradients = runner.output_gradients(halves)
    _, input_grad = timed(lambda: runner.backward(halves, gradients), device)
    _, weight_grad = timed(lambda: runner.weight_gradients(halves), device)
    times = ActionSeconds(forward, backward, forward_in_halves, input_grad, weight_grad)
    return times._replace(saved=2 * forward - _selective_seconds(runner, number))


def _selective_seconds(runner: LayerRunner, number: int) -> float:
    """Return the total time of a forward that stores results and of one that reuses them."""
    device = runner.device
    run, first = timed(lambda: runner.keep_results(number), device)
    _, second = timed(lambda: runner.recompute(run), device)
    return first + second


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
