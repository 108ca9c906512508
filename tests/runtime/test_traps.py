"""Sixteen known defects of pipeline libraries, as users report them: a test for each.

The last, what a trace tells of idle time, is in `tests/test_measured_times.py`.
"""

from __future__ import annotations

import copy
import gc
import inspect
import re
import weakref
from collections import Counter, UserList
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
from threading import Event, Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import backward
from torch.nn.functional import cross_entropy, mse_loss

import stageline
from stageline.errors import BatchError, ModelError, ScheduleError, StageError, StagelineError
from stageline.model.layers import Layer, LayerSequence
from stageline.options import Options
from stageline.pipeline import Pipeline
from stageline.runtime.backends.threads import ThreadsBackend
from stageline.runtime.placement.checks import RECOMPUTE
from stageline.schedules.action import Kind
from stageline.schedules.build import schedule_names
from stageline.zoo.cases import grouped
from stageline.zoo.emulated import Occupy

Build = Callable[..., Pipeline]
BACKENDS = ("serial", "threads")
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zbv")


@pytest.fixture
def build() -> Iterator[Build]:
    """Return a function that makes pipelines, by default of two ranks and four micro-batches."""
    built: list[Pipeline] = []

    def make(model: Any, loss_fn: Any = mse_loss, **options: Any) -> Pipeline:
        built.append(
            Pipeline(model, loss_fn, **grouped({"num_ranks": 2, "num_microbatches": 4} | options))
        )
        return built[-1]

    yield make
    for pipe in built:
        within(10, pipe.close)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=SCHEDULES)
def build_each(build: Build, backend: str, request: pytest.FixtureRequest) -> Build:
    """The same with every schedule, serial and in threads."""
    return partial(build, schedule=request.param, backend=backend)


def chain() -> nn.Sequential:
    """Nine layers, enough for two chunks on each of four ranks."""
    torch.manual_seed(4)
    blocks = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), *blocks, nn.Linear(6, 3))


def random_and_normed() -> nn.Sequential:
    torch.manual_seed(5)
    parts = [(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.3)) for _ in range(2)]
    return nn.Sequential(nn.Linear(4, 6), *parts[0], nn.Tanh(), *parts[1], nn.Linear(6, 3))


class Head(nn.Module):
    """Logits of tokens, by the weight of the embedding."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight = embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)


def tied() -> nn.Sequential:
    torch.manual_seed(6)
    embedding = nn.Embedding(7, 4)
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(embedding, *blocks, Head(embedding))


class Note(nn.Module):
    """Returns its input and records something of every call."""

    def __init__(self, what: Callable[[Tensor], Any]) -> None:
        super().__init__()
        # a list would be state of the layer, in which a recomputation leaves no trace
        self.what, self.notes = what, UserList[Any]()

    def forward(self, x: Tensor) -> Tensor:
        self.notes.append(self.what(x))
        return x


class Alive:
    """Outputs of layers that are in memory, by layer and number of the call."""

    def __init__(self, layers: LayerSequence) -> None:
        self.storages: dict[tuple[str, int], weakref.ref[Any]] = {}
        self.calls: Counter[str] = Counter()
        self.peak = 0
        for layer in layers:
            layer.module.register_forward_hook(self._noting(layer.name))

    def _noting(self, name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        def note(_: nn.Module, __: Any, output: Tensor) -> None:
            self.storages[name, self.calls[name]] = weakref.ref(output.untyped_storage())
            self.calls[name] += 1
            self.peak = max(self.peak, len(self.now()))

        return note

    def now(self) -> set[tuple[str, int]]:
        return {key for key, storage in list(self.storages.items()) if storage() is not None}


def batch(num_samples: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_samples, 4, generator=generator)
    return x, torch.randn(num_samples, 3, generator=generator)


def plain_step(model: nn.Module, x: Tensor, y: Tensor, sizes: list[int]) -> None:
    """One micro-batch after another, each weighted by its share of the samples."""
    for part, target in zip(torch.split(x, sizes), torch.split(y, sizes), strict=True):
        backward(mse_loss(model(part), target) * (len(part) / len(x)))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def state(model: nn.Module) -> dict[str, Tensor]:
    return copy.deepcopy(model.state_dict())


def are_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    """Return whether two state dicts have the same names and bits."""
    pairs = zip(ours.values(), theirs.values(), strict=False)
    return bool(ours) and list(ours) == list(theirs) and all(torch.equal(a, b) for a, b in pairs)


def after_each_gradient(weight: Tensor, call: Callable[[], object]) -> None:
    """Call a function each time that a micro-batch's gradient is added to the weight's."""
    weight.register_post_accumulate_grad_hook(lambda _: call() and None)  # type: ignore[no-untyped-call]


def within(seconds: float, call: Callable[[], object]) -> None:
    """Raise the call's own error, or TimeoutError if it hangs."""
    errors: list[Exception | None] = []

    def run() -> None:
        torch.set_num_threads(1)
        try:
            call()
            errors.append(None)
        except Exception as error:
            errors.append(error)

    thread = Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert errors, f"hangs for {seconds} s"
    if errors[0] is not None:
        raise errors[0]


def test_trap_01_two_steps_add_up_and_nothing_divides_what_was_there(build_each: Build) -> None:
    model = chain()
    plain = copy.deepcopy(model)
    for each in (model, plain):  # something of the caller's own is there already
        for weight in each.parameters():
            backward(weight.square().sum())
    pipe = build_each(model)
    for seed in range(2):
        pipe.step(*batch(8, seed))
        plain_step(plain, *batch(8, seed), [2, 2, 2, 2])
    assert are_same(gradients(model), gradients(plain))


def test_trap_02_evaluating_switches_to_eval_and_leaves_gradients_alone(build_each: Build) -> None:
    model, twin = random_and_normed(), random_and_normed()
    pipe, never_evaluated = build_each(model), build_each(twin)
    x, y = batch(8)
    for each in (pipe, never_evaluated):
        each.step(x, y)
    before, buffers = gradients(model), state(model)
    pipe.eval()
    assert not any(layer.training for layer in model)
    output = pipe(x)
    with torch.no_grad():
        assert torch.equal(output, torch.cat([model(part) for part in torch.split(x, 2)]))
    assert are_same(gradients(model), before)
    assert are_same(state(model), buffers)
    pipe.train()
    assert all(layer.training for layer in model)
    for each in (pipe, never_evaluated):
        each.step(x, y)
    assert are_same(gradients(model), gradients(twin))
    assert are_same(state(model), state(twin))


@pytest.mark.parametrize("has_sample", [False, True])
def test_trap_03_nothing_runs_on_made_up_data_before_the_first_step(
    build: Build, has_sample: bool
) -> None:
    device, norm = Note(lambda x: x.device.type), nn.BatchNorm1d(6, affine=False)
    model = nn.Sequential(nn.Embedding(5, 6), device, norm, nn.Linear(6, 3))
    tokens = torch.tensor([0, 4, 1, 2, 3, 3])
    before, random = state(model), torch.get_rng_state()
    pipe = build(model, num_microbatches=3, example_inputs=tokens if has_sample else None)
    assert device.notes == (["meta"] if has_sample else [])  # shapes only, without any numbers
    assert are_same(state(model), before)
    assert not gradients(model)
    assert torch.equal(torch.get_rng_state(), random)
    pipe.step(tokens, torch.zeros(6, 3))
    plain_norm = nn.BatchNorm1d(6, affine=False)
    plain_norm(before["0.weight"][tokens])
    torch.testing.assert_close(state(norm), state(plain_norm))


def test_trap_03_evaluating_before_training_trains_to_the_same_bits(build_each: Build) -> None:
    outcomes = []
    for evaluates in (False, True):
        model = random_and_normed()
        pipe = build_each(model)
        if evaluates:
            pipe.eval()(batch(5, seed=7)[0])
            pipe.train()
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        for seed in range(3):
            pipe.step(*batch(8, seed))
            optimizer.step()
            optimizer.zero_grad()
        outcomes.append(state(model))
    assert are_same(*outcomes)


def test_trap_04_seven_samples_in_four_micro_batches_are_two_two_two_and_one(
    build_each: Build,
) -> None:
    """The next batch may have other shapes, such as longer sequences."""
    model, shapes = chain(), Note(lambda x: tuple(x.shape))
    plain = copy.deepcopy(model)
    pipe = build_each([*model, shapes])
    for sizes, length in (([2, 2, 2, 1], 5), ([3, 2, 2, 2], 9), ([1, 1], 2)):
        x, y = torch.randn(sum(sizes), length, 4), torch.randn(sum(sizes), length, 3)
        pipe.step(x, y)
        plain_step(plain, x, y, sizes)
        assert shapes.notes == [(size, length, 3) for size in sizes]
        shapes.notes.clear()
    assert are_same(gradients(model), gradients(plain))


class Times(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x * y


@pytest.mark.parametrize(
    ("num_inputs", "num_masks", "num_targets"), [(8, 8, 7), (8, 8, 16), (8, 6, 8), (3, 8, 8)]
)
def test_trap_05_batches_of_different_lengths_are_an_error_and_lose_no_sample(
    build: Build, num_inputs: int, num_masks: int, num_targets: int
) -> None:
    seen = Note(len)
    pipe = build([Layer("see", seen), Layer("mask", Times(), ("x", "mask"))])
    x, mask = torch.randn(num_inputs, 4), torch.ones(num_masks, 4)
    lengths = ", ".join(map(str, sorted({num_inputs, num_masks, num_targets})))
    with pytest.raises(BatchError, match=rf"^lengths along dim 0 are {lengths}, but "):
        pipe.step({"x": x, "mask": mask}, torch.randn(num_targets, 4))
    with pytest.raises(BatchError, match=r"^lengths along dim 0 are 5, 9, but "):
        pipe(torch.randn(9, 4), mask=torch.ones(5, 4))
    assert not seen.notes


def summed(output: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_trap_06_every_real_token_weighs_the_same_wherever_it_is(
    build_each: Build, num_ranks: int
) -> None:
    """Micro-batches of 12, 1, 0 and 5 real tokens, the others are padding."""
    model = chain()
    plain = copy.deepcopy(model)
    x, y = torch.randn(8, 6, 4), torch.randint(3, (8, 6))
    for microbatch, num_real in enumerate((12, 1, 0, 5)):
        y.view(4, 12)[microbatch, num_real:] = -100
    pipe = build_each(
        model, summed, num_ranks=num_ranks, count_fn=lambda target: (target != -100).sum()
    )
    result = pipe.step(x, y)
    for part, target in zip(torch.split(x, 2), torch.split(y, 2), strict=True):
        backward(summed(plain(part), target) * (1 / 18))
    assert are_same(gradients(model), gradients(plain))
    torch.testing.assert_close(result.loss, cross_entropy(plain(x).flatten(0, 1), y.flatten()))


def test_trap_06_every_sample_weighs_the_same_wherever_it_is(build_each: Build) -> None:
    model = chain()
    plain = copy.deepcopy(model)
    x, y = batch(7)
    y[6] += 100  # alone in its micro-batch
    result = build_each(model).step(x, y)
    plain_step(plain, x, y, [7])
    torch.testing.assert_close(result.loss, mse_loss(plain(x), y))
    torch.testing.assert_close(gradients(model), gradients(plain))


def test_trap_06_a_loss_for_each_sample_is_an_error_and_not_summed(build: Build) -> None:
    pipe = build(chain(), lambda output, target: (output - target).square().mean(1))
    with pytest.raises(StagelineError):
        pipe.step(*batch(8))


def test_trap_07_every_micro_batch_trains_not_only_the_last(build_each: Build) -> None:
    """Each sample has its own feature, and so its own column of the first gradient."""
    model = nn.Sequential(nn.Linear(8, 6), *list(chain())[1:])
    plain, calls = copy.deepcopy(model), Counter[str]()
    for name, weight in model.named_parameters():
        after_each_gradient(weight, partial(calls.update, [name]))
    x, y = torch.eye(8), batch(8)[1]
    build_each(model).step(x, y)
    plain_step(plain, x, y, [2, 2, 2, 2])
    assert gradients(model)["0.weight"].abs().amin() > 0
    assert are_same(gradients(model), gradients(plain))
    assert calls == dict.fromkeys(gradients(plain), 4)  # a hook of the caller's sees each


@pytest.mark.parametrize("num_layers", [9, 30, 31])
@pytest.mark.parametrize(
    ("schedule", "num_ranks"), [("1f1b", 4), ("gpipe", 7), ("interleaved_1f1b", 3), ("zbv", 4)]
)
def test_trap_08_every_layer_runs_whether_or_not_their_number_divides(
    build: Build, schedule: str, num_ranks: int, num_layers: int
) -> None:
    layers = LayerSequence.of(nn.Linear(3, 3) for _ in range(num_layers))
    alive = Alive(layers)
    pipe = build(layers, num_ranks=num_ranks, schedule=schedule)
    assert [number for stage in pipe._session.assembly.layout.stages for number in stage] == list(
        range(num_layers)
    )
    assert all(pipe._session.assembly.layout.stages)
    pipe.step(torch.randn(8, 3), torch.randn(8, 3))
    assert alive.calls == {layer.name: 4 for layer in layers}
    assert len(gradients(layers.modules)) == 2 * num_layers


@pytest.mark.parametrize("widths", [(99, 1, 1, 1, 1), (1, 1, 1, 1, 99), (1, 99, 1, 99, 1)])
def test_trap_08_no_rank_is_left_empty_beside_a_large_layer(
    build: Build, widths: tuple[int, ...]
) -> None:
    layers = [nn.Sequential(nn.Linear(3, width), nn.Linear(width, 3)) for width in widths]
    pipe = build([Layer(str(i), layer) for i, layer in enumerate(layers)], num_ranks=4)
    assert sorted(map(len, pipe._session.assembly.layout.stages)) == [1, 1, 1, 2]


def test_trap_08_fewer_layers_than_stages_are_an_error(build: Build) -> None:
    with pytest.raises(ModelError, match=r"^the model has 9 layers, but 10 stages need one each"):
        build(chain(), num_ranks=5, schedule="zbv")
    with pytest.raises(ModelError, match=r"^balance is \[4, 4\], but 9 layers on 2 stages need 2"):
        build(chain(), balance=[4, 4])


def test_trap_09_a_tied_embedding_stays_one_weight_over_twenty_steps(build_each: Build) -> None:
    model = tied()
    plain = copy.deepcopy(model)
    embedding, head = plain[0], plain[-1]
    head.weight = nn.Parameter(embedding.get_parameter("weight").detach())  # in the same memory
    first, second = embedding.get_parameter("weight"), head.get_parameter("weight")
    pipe = build_each(model)
    ours = torch.optim.AdamW(pipe.parameters(), lr=0.05)
    theirs = torch.optim.AdamW(list(plain.parameters())[:-1], lr=0.05)
    for _ in range(20):
        x, y = torch.randint(7, (8, 3)), torch.randn(8, 3, 7)
        pipe.step(x, y)
        plain_step(plain, x, y, [2, 2, 2, 2])
        assert first.grad is not None
        assert second.grad is not None
        first.grad, second.grad = first.grad + second.grad, None  # of each use its own, then both
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert model[0].weight is model[-1].weight
    assert len(list(pipe.parameters())) == len(list(plain.parameters())) - 1
    assert are_same(state(model), state(plain))


def test_trap_09_a_tied_gradient_counts_once_for_each_use(build_each: Build) -> None:
    """Sums of whole numbers are exact in any order, so plain autograd is the reference."""
    embedding = nn.Embedding(5, 4)
    model = nn.Sequential(embedding, nn.Linear(4, 4), nn.ReLU(), Head(embedding))
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randint(-3, 4, weight.shape))
    plain = copy.deepcopy(model)
    x, y = torch.randint(5, (8,)), torch.randint(-3, 4, (8, 5)).float()
    build_each(model, lambda output, target: (output * target).sum(1).mean()).step(x, y)
    backward((plain(x) * y).sum(1).mean())
    assert are_same(gradients(model), gradients(plain))


def left_behind(pipe: Pipeline, alive: Alive) -> set[tuple[str, int]]:
    """Return outputs of finished micro-batches that are alive in later backwards."""
    found: set[tuple[str, int]] = set()
    for stage in pipe._session.assembly.layout.stages:
        layers = [pipe.layers.layers[number] for number in stage]
        # what a stage sends on is held by the next one until its own W, which on another thread
        # comes when it comes
        is_split = any(action.kind is Kind.W for row in pipe.schedule.actions for action in row)
        is_free = is_split and isinstance(pipe._session.backend, ThreadsBackend)
        names = {layer.name for layer in (layers[:-1] if is_free else layers)}
        for weight in (weight for layer in layers for weight in layer.module.parameters()):
            microbatches = iter(range(4))

            def look(names: set[str] = names, numbers: Iterator[int] = microbatches) -> None:
                now = next(numbers)
                found.update(key for key in alive.now() if key[0] in names and key[1] % 4 < now)

            after_each_gradient(weight, look)
    pipe.step(*batch(8))
    return found | alive.now()


def test_trap_10_activations_are_gone_when_the_next_backward_comes(build_each: Build) -> None:
    """With a split backward, when the next W of the stage runs."""
    layers = LayerSequence.of(chain())
    alive = Alive(layers)
    assert not left_behind(build_each(layers), alive)
    assert set(alive.calls.values()) == {4}


def test_trap_10_recomputed_activations_are_gone_as_soon(build: Build, backend: str) -> None:
    layers = LayerSequence.of(chain())
    alive = Alive(layers)
    pipe = build(layers, schedule="gpipe", backend=backend, recompute="always")
    assert not left_behind(pipe, alive)
    assert set(alive.calls.values()) == {8}  # all forwards, and all again


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_trap_10_a_skip_is_freed_after_its_last_reader_s_backward(
    build: Build, schedule: str
) -> None:
    """The writer recomputes and holds nothing itself, so only the readers hold the skip."""
    writer = Layer("writer", nn.Linear(4, 4), ("x",), ("skip",))
    readers = [Layer(f"reader{i}", nn.Bilinear(4, 4, 4), ("x", "skip")) for i in range(3)]
    layers = LayerSequence((writer, Layer("on", nn.Identity(), ("skip",)), *readers))
    alive, held = Alive(layers), list[tuple[int, list[int]]]()
    modes = ["always", *["never"] * 4]
    pipe = build(layers, num_ranks=5, schedule=schedule, backend="serial", recompute=modes)

    def looking(reader: int) -> Callable[[], None]:
        def look() -> None:
            now = alive.now()
            held.append((reader, [i for i in range(4) if ("writer", before + i) in now]))

        return look

    pipe.step(torch.randn(8, 4), torch.randn(8, 4))  # layers with hooks get copies at first
    before = alive.calls["writer"]
    for number, reader in enumerate(readers):
        after_each_gradient(reader.module.get_parameter("weight"), looking(number))
    pipe.step(torch.randn(8, 4), torch.randn(8, 4))
    for number in range(3):  # while it goes back, a reader has its micro-batch's
        looks = [found for reader, found in held if reader == number]
        assert all(microbatch in found for microbatch, found in enumerate(looks))
    last = [found for reader, found in held if reader == 0]
    assert [min(found) for found in last] == [0, 1, 2, 3]  # and nobody has those before


def test_trap_10_recomputation_keeps_the_inputs_of_stages_and_nothing_else(build: Build) -> None:
    layers = LayerSequence.of(chain())
    alive, held = Alive(layers), list[set[tuple[str, int]]]()

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        held.append(alive.now())
        return mse_loss(output, target)

    options = {"schedule": "gpipe", "backend": "serial", "recompute": "always"}
    pipe = build(layers, loss_fn, num_ranks=3, **options)
    pipe.step(*batch(8))
    stages = [
        [layers.layers[number].name for number in stage]
        for stage in pipe._session.assembly.layout.stages[:-1]
    ]
    before_last = {name for stage in stages for name in stage}
    # when all forwards are done, of their first run; what is recomputed ahead has later numbers
    kept = {(name, call) for name, call in held[3] if name in before_last and call < 4}
    assert kept == {(stage[-1], call) for stage in stages for call in range(4)}


def trained(pipe: Pipeline, x: Tensor) -> None:
    backward(pipe(x).sum())


@pytest.mark.parametrize(
    "use",
    [
        lambda pipe, x: pipe.step(x, torch.zeros(8, 3)),
        lambda pipe, x: pipe.eval()(x),
        trained,
        lambda pipe, x: pipe(x),
    ],
    ids=["step", "evaluation", "training call", "training call without backward"],
)
def test_trap_10_nothing_of_a_step_is_left_when_its_result_is_gone(
    build_each: Build, use: Callable[[Pipeline, Tensor], object]
) -> None:
    layers = LayerSequence.of(chain())
    alive = Alive(layers)
    pipe, x = build_each(layers), batch(8)[0]
    inputs = weakref.ref(x.untyped_storage())
    use(pipe, x)
    del x
    assert not alive.now()
    assert inputs() is None


@pytest.mark.parametrize("backend", ["serial", "threads"])
def test_trap_10_nothing_of_a_failed_step_is_left_when_its_error_is_gone(
    build: Build, backend: str
) -> None:
    """So that a smaller batch can be tried when memory was short."""
    layers = LayerSequence.of([*chain(), Note(_fail)])
    alive = Alive(layers)
    pipe = build(layers, backend=backend)
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(StageError):
            pipe.step(*batch(8))
        assert not alive.now()
    finally:
        gc.enable()


class Random(nn.Module):
    """Draws, and records grad mode, autocast and the resulting dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(6), nn.Linear(6, 6)
        self.notes = UserList[object]()

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.dropout(self.linear(self.norm(x)), 0.3)
        self.notes.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), y.dtype))
        return x + y


@pytest.mark.parametrize("schedule", [*SCHEDULES, "zb_h1"])
def test_trap_11_recomputation_sees_the_same_autocast_grad_mode_and_random_numbers(
    build: Build, schedule: str, backend: str
) -> None:
    outcomes = []
    for recompute, num_calls in (("never", 4), ("always", 8), ("except_last", 7)):
        torch.manual_seed(8)
        blocks = [Random() for _ in range(4)]
        model = nn.Sequential(nn.Linear(4, 6), *blocks, nn.Linear(6, 3))
        pipe = build(model, schedule=schedule, backend=backend, recompute=recompute)
        random = torch.get_rng_state()
        with torch.autocast("cpu", torch.bfloat16):
            result = pipe.step(*batch(8))
        assert torch.equal(torch.get_rng_state(), random)
        assert [block.notes for block in blocks] == [[(True, True, torch.bfloat16)] * num_calls] * 4
        outcomes.append(gradients(model) | {"loss": result.loss})
    assert all(are_same(outcomes[0], other) for other in outcomes[1:])


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "zb_h2", "zbv"])
def test_trap_11_recomputation_saves_memory_in_zero_bubble_schedules_too(
    build: Build, schedule: str
) -> None:
    peaks = []
    for recompute in ("always", "never"):
        layers = LayerSequence.of([nn.Linear(4, 4) for _ in range(48)])
        alive = Alive(layers)
        options = {"schedule": schedule, "backend": "serial", "recompute": recompute}
        pipe = build(layers, num_ranks=4, num_microbatches=8, **options)
        pipe.step(torch.randn(8, 4), torch.randn(8, 4))
        peaks.append(alive.peak)
    assert peaks[0] < 0.9 * peaks[1]


@pytest.mark.parametrize("num_microbatches", [1, 2, 3])
@pytest.mark.parametrize("schedule", schedule_names(synchronous=True))
def test_trap_12_fewer_micro_batches_than_ranks_train_or_are_refused_at_once(
    build: Build, schedule: str, num_microbatches: int, backend: str
) -> None:
    model = chain()
    plain = copy.deepcopy(model)
    sizes = {"num_ranks": 4, "num_microbatches": num_microbatches}
    if schedule == "dualpipe_v":
        with pytest.raises(ScheduleError, match=f"is {num_microbatches}, but 'dualpipe_v' on 4 ra"):
            build(model, schedule=schedule, backend=backend, **sizes)
        return
    pipe = build(model, schedule=schedule, backend=backend, **sizes)
    within(20, lambda: pipe.step(*batch(6)))
    plain_step(plain, *batch(6), [6 // num_microbatches] * num_microbatches)
    assert are_same(gradients(model), gradients(plain))


@pytest.mark.parametrize(("schedule", "num_ahead"), [("gpipe", 6), ("1f1b", 4)])
def test_trap_12_no_receive_keeps_a_rank_from_work_that_is_ready(
    build: Build, schedule: str, num_ahead: int
) -> None:
    """The last rank starts only after the first has done everything that does not depend on it."""
    done = Event()
    first = Note(lambda _: done.set() if len(first.notes) == num_ahead - 1 else None)
    last = Note(lambda _: done.wait(20))
    layers = [first, nn.Linear(4, 4), nn.Tanh(), last]
    pipe = build(layers, num_ranks=4, num_microbatches=6, schedule=schedule)
    within(30, lambda: pipe.step(torch.randn(6, 4), torch.randn(6, 4)))
    assert last.notes == [True] * 6


def _fail(*_: object) -> None:
    raise RuntimeError("out of memory")


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_trap_12_a_rank_that_fails_stops_the_others_with_its_own_words(
    build_each: Build, when: str
) -> None:
    model = chain()
    pipe = build_each(model, num_ranks=4)
    if when == "forward":
        model.get_submodule("3.0").register_forward_hook(_fail)
    else:
        after_each_gradient(model.get_parameter("3.0.weight"), _fail)
    with pytest.raises(StageError, match=r"^rank \d failed in layer .*\n  RuntimeError: out of me"):
        within(20, lambda: pipe.step(*batch(8)))


@pytest.mark.parametrize(
    ("option", "value", "seen", "advice"),
    [
        ("num_ranks", 0, "num_ranks is 0", "a whole number from 1 up"),
        ("num_ranks", 2.0, "num_ranks is 2.0", "a whole number from 1 up"),
        ("num_ranks", 10, "the model has 9 layers", "use fewer ranks or chunks"),
        ("num_microbatches", "4", "num_microbatches is '4'", "a whole number from 1 up"),
        ("schedule", 3, "a schedule is 3", "build one with sl.build_schedule"),
        ("schedule", "dualpipe_v", "num_microbatches is 3", "use num_microbatches=4, or 'zbv'"),
        ("balance", [3, 3], "balance is [3, 3]", "2 numbers from 1 up whose sum is 9"),
        ("balance", [9, 0], "balance is [9, 0]", "2 numbers from 1 up whose sum is 9"),
        ("balance", 9, "balance is 9", "2 numbers from 1 up whose sum is 9"),
        ("balance", [4.5, 4.5], "balance is [4.5, 4.5]", "2 numbers from 1 up"),
        ("recompute", "some", "recompute is 'some'", "one of 'never', 'always', 'except_last'"),
        ("recompute", ["never"], "recompute is ['never']", "or one for each stage"),
        ("recompute", None, "recompute is None", "'never', 'always', 'except_last'"),
        ("accumulate", "fast", "accumulate is 'fast'", "'exact' or 'fused'"),
        ("batch_norm", None, "batch_norm is None", "'minibatch' or 'microbatch'"),
        ("backend", "gpu", "backend is 'gpu'", "'threads' or 'serial'"),
        ("devices", ["cpu"], "devices has 1 entries", "give one each"),
    ],
)
def test_trap_13_a_wrong_option_is_told_in_the_caller_s_own_words(
    build: Build, option: str, value: Any, seen: str, advice: str
) -> None:
    with pytest.raises(StagelineError) as error:
        build(chain(), **{"num_microbatches": 3, option: value})
    text = str(error.value)
    assert text.startswith(f"{seen}, but ")
    assert advice in text.removeprefix(seen)
    known = {*inspect.signature(Pipeline).parameters, *schedule_names(), *stageline.__all__}
    known |= {field.name for field in fields(Options)}
    names = re.findall(r"\w*(?:_|[a-z][A-Z])\w*", text)  # in_such or inSuch a way
    assert set(names) <= known | set(RECOMPUTE)


def test_trap_13_a_schedule_s_name_that_is_misspelt_is_put_right(build: Build) -> None:
    with pytest.raises(ScheduleError, match=r"^schedule 'zvb' is not known: did you mean 'zbv'\?$"):
        build(chain(), schedule="zvb")


@pytest.mark.parametrize(
    ("num_samples", "num_calls"), [(8, [2, 2, 2, 1]), (3, [2, 2, 1]), (2, [2, 1]), (1, [1])]
)
def test_trap_14_the_last_micro_batch_of_a_short_batch_is_not_recomputed(
    build_each: Build, num_samples: int, num_calls: list[int]
) -> None:
    """Samples are numbered, so that a layer knows its micro-batch."""
    size = num_samples // len(num_calls)
    first, last = (Note(lambda x: int(x[0, 0]) // size) for _ in range(2))
    pipe = build_each([first, Occupy(0, 0, 0), nn.Identity(), last], recompute="except_last")
    pipe.step(torch.arange(float(num_samples))[:, None], torch.zeros(num_samples, 1))
    for note in (first, last):
        assert sorted(Counter(note.notes).items()) == list(enumerate(num_calls))


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zbv"])
def test_trap_15_a_checkpoint_has_every_parameter_under_the_model_s_own_name(
    build: Build, schedule: str, num_ranks: int
) -> None:
    """With a tied weight, buffers and nested Sequentials."""

    def make() -> nn.Sequential:
        *layers, head = tied()
        return nn.Sequential(*layers, nn.Sequential(nn.BatchNorm1d(4), nn.Sequential(head)))

    model, plain, fresh = make(), make(), make()
    pipe = build(model, schedule=schedule, num_ranks=num_ranks)
    pipe.step(torch.randint(7, (8,)), torch.randn(8, 7))
    torch.optim.SGD(pipe.parameters(), lr=0.1).step()
    saved = copy.deepcopy(pipe.state_dict())
    assert list(saved) == list(plain.state_dict())
    plain.load_state_dict(saved, strict=True)
    assert are_same(state(plain), state(model))
    other = build(fresh, num_ranks=5 - num_ranks)
    fresh.load_state_dict(saved, strict=True)
    tokens, plain = torch.arange(7), plain.eval()
    parts = [plain(part) for part in torch.split(tokens, 2)]
    assert torch.equal(other.eval()(tokens), torch.cat(parts))
