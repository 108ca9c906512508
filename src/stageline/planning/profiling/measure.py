"""A profile by measurement: each layer runs forward and backward, as a stage of its own would.

For each size of micro-batch, medians over some rounds through all sizes and layers, both ways:

    F ─► B             as most schedules go
    F ─► I ─► W        as those with a backward in halves do; this F takes longer

With `ranks` above 1 as many threads run the layers of models of their own meanwhile, so that times
contain the waits for a shared core and for memory. Each time contains what a stage needs beside its
layers, 30 µs here. A stage needs it once, so a sum over layers is as much too long for each further
layer: less than 5 % for the demo's GPT.
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

from stageline.arguments import check_size
from stageline.errors import PlanError
from stageline.limits import MOST_PROCESSES, check_most
from stageline.model.layers import LayerSequence
from stageline.planning.profiling.activations import kept_bytes
from stageline.planning.profiling.assemble import Times, measurement, tied_weights
from stageline.planning.profiling.profile import Profile
from stageline.planning.profiling.solo import Solo
from stageline.planning.profiling.subject import LossFunction, Model, Subject
from stageline.planning.progress import progress_of
from stageline.runtime.parity.plain_loop import preserved_model

T = TypeVar("T")
WARM_UP = 2  # runs that do not count: memory is new to the process, layers are watched


def profile(
    model: Model,
    sample: Any,
    *,
    loss_fn: LossFunction | None = None,
    target: Any = None,
    sizes: Sequence[int] | None = None,
    repeats: int = 7,
    ranks: int = 1,
    progress: bool = True,
) -> Profile:
    """Measure what each layer of a model costs, on the device that it is on.

    `sample` is a batch of inputs as `Pipeline.step` takes it, and `target` goes with it; with a
    `loss_fn` the loss is part of the last layer. `sizes` are numbers of samples in a micro-batch,
    by default a quarter, a half and all of the sample, which is repeated for more. If several
    `ranks` are to share the cores of this machine, as many run at once. The model is left as it
    was; the other ranks have copies of it.

    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    >>> found = profile(model, torch.ones(8, 4))
    >>> found.names, [each.samples for each in found.measurements]
    (('0', '1', '2'), [2, 4, 8])
    >>> [layer.activation for layer in found.at(16).layers]  # what the ReLU writes: 16 × 8 floats
    [0.0, 512.0, 0.0]
    """
    subject = Subject.of(model, sample, loss_fn, target)
    _check(subject.layers, repeats, ranks)
    samples = subject.sizes(sizes)
    others = [subject._replace(layers=subject.layers.copy()) for _ in range(ranks - 1)]
    rounds = WARM_UP + repeats
    with (
        preserved_model(subject.layers),
        torch.random.fork_rng(devices=[]),
        progress_of(len(samples) * rounds, "rounds", shown=progress) as begin,
    ):
        solos = [subject.solo(size) for size in samples]
        kept = [kept_bytes(solo) for solo in solos]
        beside = [[_filled(other.solo(size)) for other in others] for size in samples]
        taken = [_rounds(solos, beside, begin) for _ in range(rounds)][WARM_UP:]
        by_size = zip(*taken, strict=True)
        times = [[_usual(column) for column in zip(*rows, strict=True)] for rows in by_size]
        measurements = tuple(map(measurement, samples, solos, times, kept))
    device = _device_name(subject.layers, ranks)
    return Profile(subject.names, measurements, tied_weights(solos[0]), device)


def _check(layers: LayerSequence, repeats: int, ranks: int) -> None:
    for name, count in (("repeats", repeats), ("ranks", ranks)):
        check_size(name, count, error=PlanError)
        check_most(name, count, MOST_PROCESSES, error=PlanError)
    for layer in layers:
        if any(tensor.is_meta for tensor in layer.module.parameters()):
            raise PlanError(
                f"layer {layer.name!r} is on the meta device, but profile has to run it: build the "
                "model on a device, or let estimate() work with its shapes alone"
            )


class Once(NamedTuple):
    """Seconds of each action, both ways."""

    forward: float
    backward: float
    forward_in_halves: float
    input_grad: float
    weight_grad: float


def _rounds(
    solos: Sequence[Solo], beside: Sequence[Sequence[Solo]], begin: Callable[[], None]
) -> list[list[Once]]:
    """All sizes and layers once: what slows the machine down for a while slows all of them down."""
    taken = []
    for solo, others in zip(solos, beside, strict=True):
        begin()
        with _at_work(others):
            taken.append([_once(solo, number) for number in range(len(solo.layers))])
    return taken


def _filled(solo: Solo) -> Solo:
    solo.fill()
    return solo


def _usual(taken: Sequence[Once]) -> Times:
    """The medians, and how far apart rounds are; B is divided as I and W divide what they take."""
    usual = Once(*(median(column) for column in zip(*taken, strict=True)))
    halves = usual.input_grad + usual.weight_grad
    longer = usual.forward_in_halves + halves - usual.forward - usual.backward
    return Times(
        usual.forward,
        usual.backward * usual.input_grad / halves,
        usual.backward * usual.weight_grad / halves,
        max(0.0, longer),
        _spread([once.forward + once.backward for once in taken]),
    )


def _spread(times: Sequence[float]) -> float:
    """Half of what the quartiles are apart: half of the rounds are that close, or closer.

    >>> _spread([10.0, 11.0, 12.0, 13.0, 90.0])
    1.0
    """
    if len(times) < 2:
        return 0.0
    low, _, high = quantiles(times, n=4, method="inclusive")
    return (high - low) / 2


def _once(solo: Solo, number: int) -> Once:
    """Both ways in turns, so that whatever else the machine does slows both down alike."""
    whole, forward = _timed(lambda: solo.forward(number, in_halves=False))
    gradients = solo.ones(whole)
    _, backward = _timed(lambda: solo.backward(whole, gradients))
    halves, forward_in_halves = _timed(lambda: solo.forward(number, in_halves=True))
    gradients = solo.ones(halves)
    _, input_grad = _timed(lambda: solo.backward(halves, gradients))
    _, weight_grad = _timed(lambda: solo.weight_gradients(halves))
    return Once(forward, backward, forward_in_halves, input_grad, weight_grad)


def _timed(work: Callable[[], T]) -> tuple[T, float]:
    """With what it left to a GPU; CUDA's part has not run on hardware."""
    start = perf_counter()
    result = work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return result, perf_counter() - start


@contextmanager
def _at_work(others: Sequence[Solo]) -> Iterator[None]:
    """Meanwhile other ranks run their layers, round and round, each from another one on."""
    num_threads, is_over = torch.get_num_threads(), Event()

    def work(rank: int, solo: Solo) -> None:
        torch.set_num_threads(num_threads)  # OpenMP counts for each thread anew
        count = len(solo.layers)
        for turn in itertools.count(count * rank // (len(others) + 1)):
            if is_over.is_set():
                return
            _once(solo, turn % count)

    with ThreadPoolExecutor(max(1, len(others)), thread_name_prefix="stageline-profile") as pool:
        futures = [pool.submit(work, rank, solo) for rank, solo in enumerate(others, start=1)]
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
