"""Streams: what `pipe.run` trains is the plain program of the same rules to the bit, wherever the
stream ends.

The plain program of asynchronous rules is `stageline.zoo.plain_asynchronous`, with which the
runtime has nothing in common but the rule for seeds.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import cycle, islice
from typing import Any, NamedTuple

import pytest
import torch
from tests.runtime.test_parity import covering
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler, OneCycleLR

from stageline.model.layers import LayerSequence
from stageline.options import Options
from stageline.pipeline import Pipeline
from stageline.runtime.batches.result import StepResult
from stageline.runtime.batches.stream_results import StepResults
from stageline.runtime.placement.checks import RECOMPUTE
from stageline.schedules.build import schedule_names
from stageline.zoo.cases import grouped
from stageline.zoo.plain import train_plainly
from stageline.zoo.plain_asynchronous import train_asynchronously

Weights = list[nn.Parameter]
MakeOptimizer = Callable[[Weights], Optimizer]
Batch = tuple[Tensor, Tensor]

BACKENDS = ("serial", "threads")
RULES: dict[str, dict[str, Any]] = {
    "pipedream": {"schedule": "pipedream"},
    "vertical_sync": {"schedule": "pipedream", "vertical_sync": True},
    "pipedream_2bw": {"schedule": "pipedream_2bw"},
}
BALANCES = {1: [8], 2: [3, 5], 3: [2, 4, 2], 4: [2, 2, 2, 2]}
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "momentum": lambda weights: SGD(weights, 0.02, momentum=0.9),
    "decay": lambda weights: SGD(weights, 0.02, momentum=0.9, weight_decay=0.1, nesterov=True),
    "adamw": lambda weights: AdamW(weights, 1e-2, weight_decay=0.1),
}
SEED = 5


def noisy(dropout: float = 0.2) -> LayerSequence:
    """A model with dropout, BatchNorm, and weights in every second layer."""
    torch.manual_seed(1)
    return LayerSequence.of(
        [
            *(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.BatchNorm1d(5)),
            *(nn.Linear(8, 8), nn.Dropout(dropout), nn.Linear(8, 8), nn.Linear(8, 3)),
        ]
    )


quiet = partial(noisy, 0.0)  # a second stream of it has the numbers of a first one


def batches(*lengths: int) -> list[Batch]:
    torch.manual_seed(2)
    return [(torch.randn(length, 5, 6), torch.randn(length, 5, 3)) for length in lengths]


class Trained(NamedTuple):
    """What training leaves: tensors and losses."""

    tensors: dict[str, Tensor]  # weights, buffers, and what the optimizer of each stage keeps
    losses: list[float]


def trained(layers: LayerSequence, optimizers: Iterable[Optimizer], losses: list[float]) -> Trained:
    tensors = dict(layers.state_dict())
    for stage, optimizer in enumerate(optimizers):
        for number, state in optimizer.state_dict()["state"].items():
            tensors |= {f"{stage}.{number}.{name}": tensor for name, tensor in state.items()}
    return Trained({name: tensor.clone() for name, tensor in tensors.items()}, losses)


def plainly(
    data: Iterable[Batch],
    layers: LayerSequence,
    make_optimizer: MakeOptimizer = OPTIMIZERS["momentum"],
    **given: Any,
) -> Trained:
    """Train by the plain program of the asynchronous rules."""
    optimizers: list[Optimizer] = []

    def make(weights: Weights) -> Optimizer:
        optimizers.append(make_optimizer(weights or [nn.Parameter(torch.zeros(1))]))
        return optimizers[-1]

    defaults: dict[str, Any] = {"seed": SEED, "num_microbatches": 1, "rule": "pipedream"}
    losses = train_asynchronously(layers, mse_loss, make, data, **defaults | given)
    return trained(layers, optimizers, losses)


def build(
    layers: LayerSequence, make_optimizer: MakeOptimizer = OPTIMIZERS["momentum"], **given: Any
) -> Pipeline:
    defaults: dict[str, Any] = {"seed": SEED, "num_microbatches": 1, "schedule": "pipedream"}
    options = defaults | given
    options.setdefault("num_ranks", len(options.get("balance", [1, 1, 1])))
    return Pipeline(layers, mse_loss, optimizer_fn=make_optimizer, **grouped(options))


def streamed(data: Iterable[Batch], layers: LayerSequence, *args: Any, **options: Any) -> Trained:
    """Train by `pipe.run`."""
    pipe = build(layers, *args, **options)
    losses = [float(result.loss) for result in pipe.run(data)]
    pipe.close()
    return trained(layers, pipe.optimizers, losses)


def assert_same_bits(found: Trained, wanted: Trained) -> None:
    assert found.tensors.keys() == wanted.tensors.keys()
    for name, tensor in found.tensors.items():
        assert torch.equal(tensor, wanted.tensors[name]), name
    assert found.losses == pytest.approx(wanted.losses, rel=1e-5)  # sums are rounded differently


FACTORS = (
    [("pipedream", 1), ("pipedream", 4), ("vertical_sync", 1), ("pipedream_2bw", 4)],
    tuple(BALANCES),
    tuple(OPTIMIZERS),
    ("never", "always"),
    BACKENDS,
)


@pytest.mark.parametrize(
    ("rule_and_size", "num_stages", "optimizer", "recompute", "backend"), covering(FACTORS)
)
def test_twenty_micro_batches_leave_the_bits_of_the_plain_program(
    rule_and_size: tuple[str, int],
    num_stages: int,
    optimizer: str,
    recompute: str,
    backend: str,
) -> None:
    rule, size = rule_and_size
    shared = {"balance": BALANCES[num_stages], "num_microbatches": size}
    data = batches(*[2 * size] * (20 // size))
    found = streamed(
        data,
        noisy(),
        OPTIMIZERS[optimizer],
        recompute=recompute,
        backend=backend,
        **shared,
        **RULES[rule],
    )
    assert_same_bits(found, plainly(data, noisy(), OPTIMIZERS[optimizer], rule=rule, **shared))


@pytest.mark.parametrize(("rule", "backend"), list(zip(RULES, cycle(BACKENDS))))
def test_mini_batches_of_any_length_leave_the_bits_of_the_plain_program(
    rule: str, backend: str
) -> None:
    """Micro-batches of several sizes; short mini-batches have fewer."""
    shared: dict[str, Any] = {"balance": BALANCES[3], "num_microbatches": 3}
    data = batches(7, 1, 6, 2, 9)
    found = streamed(data, noisy(), backend=backend, **shared, **RULES[rule])
    assert_same_bits(found, plainly(data, noisy(), rule=rule, **shared))


@pytest.mark.parametrize("num_minibatches", [0, 1, 2, 3])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_stream_that_ends_before_the_pipeline_is_full_is_trained_as_well(
    num_minibatches: int, backend: str
) -> None:
    data = batches(*[4] * num_minibatches)
    found = streamed(data, noisy(), balance=BALANCES[4], backend=backend)
    assert len(found.losses) == num_minibatches
    assert_same_bits(found, plainly(data, noisy(), balance=BALANCES[4]))


def tied_within_a_stage() -> LayerSequence:
    """The first two layers share a weight, and so do the last two."""
    layers = quiet()
    modules = list(layers.modules)
    first, second = nn.Linear(6, 6), nn.Linear(6, 6)
    second.weight = first.weight
    third, fourth = nn.Linear(3, 3), nn.Linear(3, 3)
    fourth.weight = third.weight
    return LayerSequence.of([first, second, *modules, third, fourth])


def partly_frozen() -> LayerSequence:
    """The first stage has nothing to train, nor has a layer of the second."""
    layers = noisy()
    for number in (0, 4):
        layers.layers[number].module.requires_grad_(requires_grad=False)
    return layers


@pytest.mark.parametrize(
    ("case", "rule", "recompute"),
    covering(
        (
            [(tied_within_a_stage, (3, 5, 4)), (partly_frozen, (2, 4, 2))],
            RULES,
            ["never", "always"],
        )
    ),
)
def test_weights_that_are_tied_within_a_stage_or_frozen_are_trained_the_same(
    case: tuple[Callable[[], LayerSequence], tuple[int, ...]], rule: str, recompute: str
) -> None:
    make, balance = case
    data = batches(6, 4, 6, 2)
    shared: dict[str, Any] = {"balance": balance, "num_microbatches": 3}
    wanted = plainly(data, make(), rule=rule, **shared)
    found = streamed(data, make(), recompute=recompute, **shared, **RULES[rule])
    for name, tensor in make().state_dict().items():  # stages without weights have no optimizer
        assert torch.equal(found.tensors[name], wanted.tensors[name]), name
        assert not torch.equal(found.tensors[name], tensor) or make is partly_frozen
    assert found.losses == pytest.approx(wanted.losses, rel=1e-5)


# When results come


@pytest.mark.parametrize(
    ("schedule", "backend"),
    list(zip(["pipedream", "pipedream_2bw", "1f1b", "zbv", "pipedream"], cycle(BACKENDS))),
)
def test_results_come_in_order_so_many_mini_batches_after_their_own_as_ahead_says(
    schedule: str, backend: str
) -> None:
    data, seen = batches(*[4] * 7), list[int]()

    def loader() -> Iterator[Batch]:
        for number, batch in enumerate(data):
            seen.append(number)
            yield batch

    pipe = build(quiet(), schedule=schedule, num_ranks=2, num_microbatches=4, backend=backend)
    for number, result in enumerate(pipe.run(loader())):
        assert len(seen) == min(7, number + pipe.ahead + 1)
        assert len(result.losses) == 4
    assert len(seen) == 7
    assert 1 <= pipe.ahead <= 3
    pipe.close()


def order_of_first_stage(pipe: Pipeline, data: list[Batch]) -> str:
    """F for a forward of it, S for a step of its optimizer."""
    order: list[str] = []
    pipe.layers.layers[0].module.register_forward_hook(lambda *_: order.append("F"))
    pipe.optimizers[0].register_step_post_hook(lambda *_: order.append("S"))
    assert len(list(pipe.run(data))) == len(data)
    return "".join(order)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_pipeline_is_not_drained_between_mini_batches(backend: str) -> None:
    """Stage 0 of 3 is two forwards ahead of its backwards from the first to the last."""
    pipe = build(quiet(), num_ranks=3, backend=backend)
    assert order_of_first_stage(pipe, batches(*[4] * 8)) == "FFF" + "SF" * 5 + "SSS"
    assert pipe.ahead == 3
    pipe.close()


def test_2bw_is_not_drained_between_mini_batches() -> None:
    """When stage 0 of 2 steps, a micro-batch of the next mini-batch is on its way already."""
    pipe = build(quiet(), schedule="pipedream_2bw", num_ranks=2, num_microbatches=2)
    assert order_of_first_stage(pipe, batches(*[4] * 4)) == "FFF" + "SFF" * 2 + "SFS"
    pipe.close()


# Where streams end


class Loader:
    """A loader that counts its batches, and may fail after some."""

    def __init__(self, data: list[Batch], breaks: bool = False) -> None:
        self.data, self.breaks, self.num_given = data, breaks, 0

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.data:
            self.num_given += 1
            yield batch
        if self.breaks:
            raise OSError("the disk is full")


def to_the_end(stream: StepResults) -> int:
    return len(list(stream))


def until_the_loader_breaks(stream: StepResults) -> int:
    results: list[StepResult] = []
    with pytest.raises(OSError, match="the disk is full"):
        results.extend(result for result in stream)
    return len(results)


def with_a_break(stream: StepResults) -> int:
    """As a for loop is left: nobody holds the stream any more."""
    count = 0
    for _ in stream:
        count += 1
        if count == 2:
            break
    stream.close()
    return count


def until_the_body_raises(stream: StepResults) -> int:
    def work() -> None:
        for number, _ in enumerate(stream):
            if number == 1:
                raise KeyError("of the caller's own")

    with pytest.raises(KeyError, match="of the caller's own"):
        work()
    stream.close()
    return 2


def until_it_is_closed(stream: StepResults) -> int:
    next(stream)
    next(stream)
    stream.close()
    assert list(stream) == []
    return 2


ENDINGS: dict[str, Callable[[StepResults], int]] = {
    "end": to_the_end,
    "loader breaks": until_the_loader_breaks,
    "break": with_a_break,
    "body raises": until_the_body_raises,
    "close": until_it_is_closed,
}


def lasting(make: MakeOptimizer) -> MakeOptimizer:
    """The same optimizer for the same weights, in a second plain program."""
    made: dict[nn.Parameter, Optimizer] = {}

    def once(weights: Weights) -> Optimizer:
        return made.setdefault(weights[0], make(weights))

    return once


@pytest.mark.parametrize(("ending", "rule", "backend"), covering((ENDINGS, RULES, BACKENDS)))
def test_wherever_a_stream_ends_what_went_in_is_trained_and_the_next_one_goes_on(
    ending: str, rule: str, backend: str
) -> None:
    data = batches(*[4] * 8)
    layers, plain = quiet(), quiet()
    shared: dict[str, Any] = {"balance": BALANCES[2], "num_microbatches": 2}
    make = lasting(OPTIMIZERS["decay"])

    def by_plain(data: list[Batch]) -> Trained:
        return plainly(data, plain, make, rule=rule, **shared)

    pipe = build(layers, OPTIMIZERS["decay"], backend=backend, **shared, **RULES[rule])
    loader = Loader(data[:6], breaks=ending == "loader breaks")
    num_results = ENDINGS[ending](pipe.run(loader))
    is_left = num_results == 2
    assert num_results == (2 if is_left else 6)
    assert loader.num_given == (2 + pipe.ahead if is_left else 6)
    fed = data[: loader.num_given]
    assert_same_bits(trained(layers, pipe.optimizers, []), by_plain(fed)._replace(losses=[]))
    assert all(weight.grad is None for weight in pipe.parameters())
    x, _ = data[0]
    output = pipe.eval()(x)
    for layer in plain.modules.eval():
        x = layer(x)
    assert torch.allclose(output, x, atol=1e-6)  # cut into micro-batches
    pipe.train()
    plain.modules.train()
    losses = [float(result.loss) for result in pipe.run(data[6:])]
    assert_same_bits(trained(layers, pipe.optimizers, losses), by_plain(data[6:]))
    pipe.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_loop_that_is_left_drains_the_stream_at_once(backend: str) -> None:
    """`break` drops the only reference to the stream, and that is enough."""
    data, layers, plain = batches(*[4] * 8), quiet(), quiet()
    pipe = build(layers, balance=BALANCES[3], backend=backend)
    for _ in pipe.run(data):
        break
    assert not pipe._session.is_streaming
    wanted = plainly(data[: 1 + pipe.ahead], plain, balance=BALANCES[3])
    assert_same_bits(trained(layers, pipe.optimizers, wanted.losses), wanted)
    pipe.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_closing_the_pipeline_finishes_its_stream(backend: str) -> None:
    data, layers, plain = batches(*[4] * 8), quiet(), quiet()
    pipe = build(layers, balance=BALANCES[3], backend=backend)
    stream = pipe.run(data)
    next(stream)
    pipe.close()
    assert list(stream) == []
    wanted = plainly(data[: 1 + pipe.ahead], plain, balance=BALANCES[3])
    assert_same_bits(trained(layers, pipe.optimizers, wanted.losses), wanted)


@pytest.mark.parametrize("schedule", ["pipedream", "1f1b"])
def test_a_stream_without_end_does_not_hold_what_it_gave(schedule: str) -> None:
    pipe = build(quiet(), schedule=schedule, num_ranks=2, num_microbatches=2)
    given = [weakref.ref(result) for result in pipe.run(islice(cycle(batches(2)), 12))]
    gc.collect()
    assert sum(result() is not None for result in given) == 0
    alive: Counter[int] = Counter()
    for number, result in enumerate(pipe.run(islice(cycle(batches(2)), 12))):
        alive[number] += 1
        weakref.finalize(result, alive.pop, number)
        del result
        assert len(alive) <= pipe.ahead + 3, "they are looked at a little later, to warn of them"
    pipe.close()


# Versions of weights


class Memories:
    """How many memories of a stage's weight are alive, at the end of each of its steps."""

    def __init__(self, pipe: Pipeline) -> None:
        self.alive: list[set[int]] = [set() for _ in pipe.optimizers]
        self.counts: list[list[int]] = [[] for _ in pipe.optimizers]
        for stage, optimizer in enumerate(pipe.optimizers):
            (weight,) = optimizer.param_groups[0]["params"]
            self._note(stage, weight)
            optimizer.register_step_post_hook(partial(self._after_step, stage, weight))

    def _after_step(self, stage: int, weight: nn.Parameter, *_: object) -> None:
        self._note(stage, weight)
        self.counts[stage].append(len(self.alive[stage]))

    def _note(self, stage: int, weight: nn.Parameter) -> None:
        storage, alive = weight.untyped_storage(), self.alive[stage]
        if storage.data_ptr() not in alive:
            alive.add(storage.data_ptr())
            weakref.finalize(storage, alive.discard, storage.data_ptr())


def one_weight_each(num_stages: int) -> LayerSequence:
    """And statistics, which have no versions."""
    torch.manual_seed(1)
    norm = partial(nn.BatchNorm1d, 6, affine=False)
    stages = [nn.Sequential(nn.Linear(6, 6, bias=False), norm()) for _ in range(num_stages)]
    return LayerSequence.of([layer for stage in stages for layer in stage])


@pytest.mark.parametrize(
    ("rule", "size", "versions", "backend"),
    [
        ("pipedream", 1, [4, 3, 2, 1], "serial"),  # its warm-up forwards, and one
        ("pipedream", 1, [4, 3, 2, 1], "threads"),
        ("pipedream", 3, [2, 2, 2, 1], "serial"),
        ("vertical_sync", 1, [4, 4, 4, 4], "serial"),
        ("pipedream_2bw", 4, [2, 2, 2, 2], "threads"),
        ("pipedream_2bw", 7, [2, 2, 2, 2], "serial"),
        ("1f1b", 4, [1, 1, 1, 1], "threads"),
    ],
)
def test_a_stage_holds_the_versions_that_are_in_use_and_no_other_memory(
    rule: str, size: int, versions: list[int], backend: str
) -> None:
    options = RULES.get(rule, {"schedule": rule})
    pipe = build(
        one_weight_each(4),
        lambda weights: SGD(weights, 0.01),
        balance=[2] * 4,
        num_microbatches=size,
        backend=backend,
        **options,
    )
    memories = Memories(pipe)
    bytes_of_one = 6 * 6 * 4
    torch.manual_seed(2)
    data = [(torch.randn(2 * size, 6), torch.randn(2 * size, 6)) for _ in range(10)]
    buffers = [buffer.data_ptr() for buffer in pipe.layers.modules.buffers()]
    most: Counter[int] = Counter()
    for _ in pipe.run(data):
        for number, stage in enumerate(pipe._session.assembly.stages):
            held = stage.versions.num_bytes if stage.versions else bytes_of_one
            most[number] = max(most[number], held // bytes_of_one)
    assert [max(counts) for counts in memories.counts] == versions
    assert [min(counts[4:-4]) for counts in memories.counts] == versions
    assert [most[number] for number in range(4)] == versions
    assert [len(alive) for alive in memories.alive] == [1] * 4
    assert [buffer.data_ptr() for buffer in pipe.layers.modules.buffers()] == buffers
    pipe.close()


@pytest.mark.filterwarnings("ignore:step 0. gradients are not finite")
def test_steps_that_are_left_out_hold_no_more_versions() -> None:
    pipe = build(one_weight_each(3), balance=[2] * 3, num_microbatches=1, backend="serial")
    data = [(torch.randn(4, 6), torch.full((4, 6), torch.inf)) for _ in range(12)]
    for _ in pipe.run(data):
        kept = [
            len(stage.versions.kept) for stage in pipe._session.assembly.stages if stage.versions
        ]
        assert kept == [3, 2] or not pipe._session.is_streaming
    pipe.close()


# Learning rates, and synchronous schedules


def warm_up(optimizer: Optimizer) -> LRScheduler:
    return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))


def one_cycle(optimizer: Optimizer) -> LRScheduler:
    """Changes the momentum as well, or betas."""
    return OneCycleLR(optimizer, max_lr=0.05, total_steps=60)


@pytest.mark.parametrize(
    ("rule", "optimizer", "scheduler", "backend"),
    [
        ("pipedream", "adamw", warm_up, "threads"),
        ("pipedream", "decay", one_cycle, "serial"),
        ("vertical_sync", "decay", warm_up, "serial"),
        ("pipedream_2bw", "adamw", one_cycle, "threads"),
    ],
)
def test_a_scheduler_steps_with_each_stage(
    rule: str, optimizer: str, scheduler: Callable[[Optimizer], LRScheduler], backend: str
) -> None:
    data = batches(*[6] * 7)
    shared: dict[str, Any] = {"balance": BALANCES[3], "num_microbatches": 3}
    make = OPTIMIZERS[optimizer]
    found = streamed(
        data, noisy(), make, scheduler_fn=scheduler, backend=backend, **shared, **RULES[rule]
    )
    wanted = plainly(data, noisy(), make, make_scheduler=scheduler, rule=rule, **shared)
    assert_same_bits(found, wanted)


def with_scheduler(optimizer: Optimizer) -> Optimizer:
    scheduler = warm_up(optimizer)
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    return optimizer


@pytest.mark.parametrize("schedule", schedule_names(synchronous=True))
def test_synchronous_schedules_stream_to_the_bits_of_the_plain_loop(schedule: str) -> None:
    """And so do their steps one by one, if the optimizer is the pipeline's."""
    number = schedule_names(synchronous=True).index(schedule)
    make = OPTIMIZERS[list(OPTIMIZERS)[number % 3]]
    data = batches(9, 3, 8)
    plain = noisy()
    optimizer = with_scheduler(make(list(plain.modules.parameters())))
    losses = train_plainly(plain, mse_loss, optimizer, data, num_microbatches=4, seed=SEED)
    wanted = Trained(plain.state_dict(), losses)
    options: dict[str, Any] = {"schedule": schedule, "num_ranks": 2, "num_microbatches": 4}
    options |= {"recompute": RECOMPUTE[number % 3], "scheduler_fn": warm_up}
    backend, other = BACKENDS if number % 2 else BACKENDS[::-1]
    layers = noisy()
    found = streamed(data, layers, make, backend=backend, **options)
    assert_same_bits(Trained(layers.state_dict(), found.losses), wanted)
    layers = noisy()
    pipe = build(layers, make, backend=other, **options)
    found_losses = [float(pipe.step(*batch).loss) for batch in data]
    assert_same_bits(Trained(layers.state_dict(), found_losses), wanted)
    pipe.close()


def tied_across_stages() -> LayerSequence:
    torch.manual_seed(1)
    first, last = nn.Linear(6, 6), nn.Linear(6, 6)
    last.weight = first.weight
    return LayerSequence.of([first, nn.Tanh(), nn.Linear(6, 6), last, nn.Linear(6, 3)])


@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_tied_across_ranks_are_trained_with_a_barrier_after_each_mini_batch(
    backend: str,
) -> None:
    data, plain, layers = batches(9, 8, 3, 8), tied_across_stages(), tied_across_stages()
    optimizer = OPTIMIZERS["adamw"](list(plain.modules.parameters()))
    losses = train_plainly(plain, mse_loss, optimizer, data, num_microbatches=4, seed=SEED)
    pipe = build(
        layers,
        OPTIMIZERS["adamw"],
        schedule="1f1b",
        balance=[1, 2, 2],
        num_microbatches=4,
        backend=backend,
    )
    found = [float(result.loss) for result in pipe.run(data)]
    assert pipe.ahead == 0
    assert_same_bits(Trained(layers.state_dict(), found), Trained(plain.state_dict(), losses))
    pipe.close()


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_a_step_that_cannot_be_taken_back_waits_for_the_norm_of_all_gradients(
    schedule: str,
) -> None:
    data, plain, layers = batches(9, 8, 3, 8), noisy(), noisy()
    weights = list(plain.modules.parameters())
    optimizer = RMSprop(weights, 0.01)
    norms: list[float] = []
    optimizer.register_step_pre_hook(lambda *_: norms.append(float(clip_grad_norm_(weights, 0.5))))
    losses = train_plainly(plain, mse_loss, optimizer, data, num_microbatches=4, seed=SEED)
    assert max(norms) > 0.5
    pipe = Pipeline(
        layers,
        mse_loss,
        schedule=schedule,
        num_ranks=2,
        num_microbatches=4,
        optimizer_fn=lambda own: RMSprop(own, 0.01),
        options=Options(max_norm=0.5, seed=SEED),
    )
    found = [float(result.loss) for result in pipe.run(data)]
    wanted = Trained(plain.state_dict(), losses)
    assert_same_bits(Trained(layers.state_dict(), found), wanted)
    pipe.close()


# The guard


class Careful(SGD):
    """Skips a step if a gradient is not finite, for the plain program."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closure is used
        weights = (weight for group in self.param_groups for weight in group["params"])
        if all(weight.grad.isfinite().all() for weight in weights if weight.grad is not None):
            super().step(closure)


@pytest.mark.parametrize(("when", "rule", "backend"), covering(([0, 3], RULES, BACKENDS)))
def test_a_loss_that_is_not_finite_does_not_change_the_weights_and_warns_once(
    when: int, rule: str, backend: str
) -> None:
    data = batches(*[6] * 7)
    data[when] = data[when][0], torch.full((6, 5, 3), torch.inf)
    data[when + 1] = data[when + 1][0], torch.full((6, 5, 3), torch.nan)
    shared: dict[str, Any] = {"balance": BALANCES[3], "num_microbatches": 3}
    wanted = plainly(
        data,
        noisy(),
        lambda weights: Careful(weights, 0.02, momentum=0.9),
        make_scheduler=warm_up,
        rule=rule,
        **shared,
    )
    layers = noisy()
    pipe = build(layers, backend=backend, scheduler_fn=warm_up, **shared, **RULES[rule])
    message = (
        f"^step {when}: gradients are not finite on stages 0, 1, 2, where the step was skipped"
    )
    with pytest.warns(RuntimeWarning, match=message) as told:
        results = list(pipe.run(data))
    assert len(told) == 1
    assert told[0].filename == __file__
    skipped = [(0, 1, 2) if number in (when, when + 1) else () for number in range(7)]
    assert [result.skipped for result in results] == skipped
    assert_same_bits(trained(layers, pipe.optimizers, []), wanted._replace(losses=[]))
    assert results[when + 2].loss.isfinite()
    pipe.close()


class Burst(torch.autograd.Function):
    """Zero, with a gradient that is not finite."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:  # noqa: ARG004
        return torch.zeros_like(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:  # noqa: ARG004
        return torch.full_like(gradients[0], torch.inf)


class Bursting(nn.Module):
    """Its own gradient is not finite in one forward; what it gives back is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.calls = nn.Parameter(torch.ones(8)), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y: Tensor = x * self.weight
        return y + Burst.apply(self.weight) if self.calls == 3 else y  # type: ignore[no-untyped-call]


@pytest.mark.filterwarnings("ignore:step 2. gradients are not finite on stage 1, where")
@pytest.mark.parametrize("schedule", ["pipedream", "1f1b"])
def test_only_the_affected_stages_skip_a_step(schedule: str) -> None:
    modules = list(quiet().modules)
    layers = LayerSequence.of([*modules[:3], Bursting(), *modules[3:]])
    pipe = build(layers, schedule=schedule, balance=[3, 2, 4], backend="serial")
    skipped = [result.skipped for result in pipe.run(batches(*[4] * 5))]
    assert skipped == [(), (), (1,), (), ()]
    assert all(weight.isfinite().all() for weight in pipe.parameters())
    pipe.close()


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream_2bw"])
def test_training_that_diverges_warns_once_within_a_few_steps(schedule: str) -> None:
    """The learning rate is a thousand times too large from mini-batch 20 on."""

    def scheduler(optimizer: Optimizer) -> LRScheduler:
        return LambdaLR(optimizer, lambda step: 1.0 if step < 20 else 1000.0)

    def gradient_descent(weights: Weights) -> Optimizer:
        return SGD(weights, 0.02)

    options = {"schedule": schedule, "num_microbatches": 3, "scheduler_fn": scheduler}
    pipe = build(quiet(), gradient_descent, backend="serial", **options)
    with pytest.warns(
        RuntimeWarning, match=r"^step 2[0-4]: the (norm of the update|loss).* smaller learning"
    ) as told:
        for _ in pipe.run(batches(*[6] * 40)):
            pass
    assert len(told) == 1
    pipe.close()


def test_a_divergence_in_the_last_steps_of_a_stream_warns_too() -> None:
    data = batches(*[6] * 8)
    data[-1] = data[-1][0], 1e4 * data[-1][1]
    pipe = build(quiet(), backend="serial")
    with pytest.warns(RuntimeWarning, match=r"^step 7: the loss is "):
        list(pipe.run(data))
    pipe.close()


def from_nothing(optimizer: Optimizer) -> LRScheduler:
    return LambdaLR(optimizer, lambda step: min(1.0, step / 50))


def down_and_up(optimizer: Optimizer) -> LRScheduler:
    """The updates come to nothing after 40 steps, and then come back."""
    return CosineAnnealingLR(optimizer, 40)


@pytest.mark.parametrize(
    ("optimizer", "scheduler", "rule"),
    [
        ("momentum", None, "pipedream"),
        ("momentum", from_nothing, "pipedream_2bw"),
        ("adamw", down_and_up, "pipedream"),
        ("decay", down_and_up, "vertical_sync"),
    ],
)
def test_ordinary_training_does_not_warn(
    optimizer: str, scheduler: Callable[[Optimizer], LRScheduler] | None, rule: str
) -> None:
    """A small classifier, on two samples at a time: its gradients go up and down a lot."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
    pipe = Pipeline(
        model,
        cross_entropy,
        optimizer_fn=OPTIMIZERS[optimizer],
        scheduler_fn=scheduler,
        backend="serial",
        **grouped({"num_ranks": 2, "num_microbatches": 2, **RULES[rule]}),
    )
    teacher, data = torch.randn(8, 3), [torch.randn(2, 8) for _ in range(60)]
    assert len(list(pipe.run((x, (x @ teacher).argmax(1)) for x in data))) == 60
    pipe.close()
