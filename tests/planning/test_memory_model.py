"""The memory model against bytes that are alive while a pipeline runs.

Ranks share this process, but are measured as if each had a device of its own: what passes between
stages is copied, on its way and again as it arrives, and what is on its way belongs to nobody.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from stageline.costs import Costs
from stageline.model.layers import INPUT, LayerSequence
from stageline.pipeline import Pipeline
from stageline.planning.cluster.cluster import Cluster, Level
from stageline.planning.partition.rank_devices import RankDevices
from stageline.planning.partition.stage_costs import StageCut, stage_costs
from stageline.planning.profiling.estimate import estimate
from stageline.planning.profiling.profile_result import (
    LayerCost,
    Measurement,
    Profile,
    TiedParameter,
    ValueCost,
)
from stageline.report.memory import peak_memory
from stageline.runtime.settings import LossFunction
from stageline.runtime.stage import kept_results
from stageline.runtime.stage.stage import Stage
from stageline.schedules.action import Kind
from stageline.zoo import gpt
from stageline.zoo.amoebanet import amoebanet_d
from stageline.zoo.cases import grouped
from stageline.zoo.resnet import resnet
from stageline.zoo.transformer import transformer
from stageline.zoo.unet import unet

SAMPLES, NUM_MICROBATCHES = 2, 6
NOBODY = -1
MODELS = ("transformer", "gpt", "unet", "resnet", "amoebanet")
RECOMPUTED = {"never": (False, False), "always": (True, False), "selective": (True, True)}
SLOW_ONE_LAST = [*MODELS[:-1], pytest.param(MODELS[-1], marks=pytest.mark.slow)]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def costly_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """These models are narrow: a selective recomputation would keep nothing of them."""
    monkeypatch.setattr(kept_results, "LEAST_PRODUCTS_PER_VALUE", 1)


class Subject(NamedTuple):
    layers: LayerSequence
    loss_fn: LossFunction
    inputs: Tensor
    target: Tensor


class SumOfProducts(nn.Module):
    """A layer whose products are saved by nothing: a backward needs its input only."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = (part(x) for part in self.parts)
        found: Tensor = first + second + third
        return found


def make(name: str) -> Subject:
    torch.manual_seed(0)
    count = SAMPLES * NUM_MICROBATCHES
    images, classes = torch.randn(count, 3, 32, 32), torch.randint(10, (count,))
    tokens = torch.randint(64, (count, 32))
    match name:
        case "amoebanet":
            layers = amoebanet_d(num_classes=10, num_layers=3, num_filters=16)
            return Subject(layers, cross_entropy, images, classes)
        case "transformer":
            layers = transformer(6, vocabulary=64, width=32, heads=4)
            return Subject(layers, gpt.loss, tokens, tokens)
        case "gpt":
            layers = gpt.gpt(vocabulary=64, width=32, heads=4, blocks=3, context=32, dropout=0.1)
            return Subject(layers, gpt.loss, tokens, tokens)
        case "sums":
            layers = LayerSequence.of([SumOfProducts(16) for _ in range(4)])
            return Subject(layers, cross_entropy, torch.randn(count, 16), classes)
        case "unet":
            layers = unet(channels=3, classes=10, width=8)
            return Subject(layers, cross_entropy, images, torch.randint(10, (count, 32, 32)))
        case _:
            layers = resnet(channels=3, classes=10, width=8, blocks=[2, 2, 1])
            return Subject(layers, cross_entropy, images, classes)


@cache
def estimated(name: str) -> Profile:
    layers, loss_fn, inputs, target = make(name)
    rates = {"flops": 1e12, "bandwidth": 1e11}
    return estimate(layers, inputs, **rates, loss_fn=loss_fn, target=target, sizes=[SAMPLES])


class Alive(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Bytes of what operators made, as long as anybody holds them, by the rank that was at work."""

    def __init__(self, there: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rank = NOBODY
        self.known = {tensor.untyped_storage()._cdata for tensor in there}
        self.bytes: Counter[int] = Counter()
        self.most: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._note(tensor.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, rank, size = storage._cdata, self.rank, storage.nbytes()
        if key not in self.known:
            self.known.add(key)
            self.bytes[rank] += size
            weakref.finalize(storage, self._forget, key, rank, size)
            self.most[rank] = max(self.most[rank], self.bytes[rank])

    def _forget(self, key: int, rank: int, size: int) -> None:
        self.known.remove(key)
        self.bytes[rank] -= size


class Watch:
    """Around the stages of a pipeline: the most that is alive on each rank between actions."""

    def __init__(self, pipe: Pipeline, there: list[Tensor]) -> None:
        self.pipe, self.alive = pipe, Alive(there)
        self.settled: Counter[int] = Counter()
        for stage, rank in zip(pipe._session.assembly.stages, pipe.schedule.placement, strict=True):
            self._surround(stage, rank)

    def _surround(self, stage: Stage, rank: int) -> None:
        forward, backward = stage.forward, stage.backward

        def copied_forward(this: Any, waiting: Any) -> Any:
            values = {v: t if v.writer == INPUT else _copy(t) for v, t in this.values.items()}
            found = forward(this._replace(values=values), waiting)
            self.alive.rank = NOBODY
            return found._replace(written={v: _copy(tree) for v, tree in found.written.items()})

        def copied_backward(microbatch: int, gradients: Any, waiting: Any, **how: Any) -> Any:
            back = backward(microbatch, _copy(gradients), waiting, **how)
            self.alive.rank = NOBODY
            return _copy(back)

        changed: dict[str, Callable[..., Any]] = {
            "forward": copied_forward,
            "backward": copied_backward,
            "prepare_backward": stage.prepare_backward,
            "weight_gradients": stage.weight_gradients,
        }
        for name, function in changed.items():
            setattr(stage, name, self._watched(function, rank))

    def _watched(self, function: Callable[..., Any], rank: int) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            self.alive.rank = rank
            result = function(*args, **kwargs)
            self.alive.rank = NOBODY
            self.settled[rank] = max(self.settled[rank], self._now(rank))
            return result

        return watched

    def _now(self, rank: int) -> int:
        """Without gradients of weights, and without what BatchNorm saw of each micro-batch."""
        apart = [
            double.grad
            for _, doubles in self.pipe._session.assembly.tied.by_weight
            for number, double in doubles
            if self.pipe._session.assembly.layout.rank_of_layer[number] == rank
            and double.grad is not None
        ]
        for stage, home in zip(
            self.pipe._session.assembly.stages, self.pipe.schedule.placement, strict=True
        ):
            if home == rank:
                seen = stage.statistics.moments.values()
                apart += [t for row in seen for _, m in row for t in (m.mean, m.squares)]
        return self.alive.bytes[rank] - sum(t.untyped_storage().nbytes() for t in apart)


def _copy(tree: Any) -> Any:
    def copied(item: Any) -> Any:
        if not isinstance(item, Tensor):
            return item
        return item.detach().clone().requires_grad_(item.requires_grad)

    return pytree.tree_map(copied, tree)


def stepped(name: str, **options: Any) -> Pipeline:
    layers, loss_fn, inputs, target = make(name)
    pipe = Pipeline(
        layers, loss_fn, num_microbatches=NUM_MICROBATCHES, backend="serial", **grouped(options)
    )
    pipe.step(inputs, target)  # at first layers are watched; gradients are there from now on
    return pipe


def watched(name: str, pipe: Pipeline) -> Watch:
    """Measure another step."""
    _, _, inputs, target = make(name)
    modules = pipe.layers.modules
    gradients = [weight.grad for weight in modules.parameters() if weight.grad is not None]
    watch = Watch(pipe, [*gradients, *modules.parameters(), *modules.buffers(), inputs, target])
    with watch.alive:
        pipe.step(inputs, target)
    return watch


def costs_of(name: str, pipe: Pipeline, *, recompute: str, optimizer: str = "momentum") -> Costs:
    profile = estimated(name)
    num_ranks = pipe.schedule.num_ranks
    balance = tuple(len(numbers) for numbers in pipe._session.assembly.layout.stages)
    again, selective = ((chosen,) * len(balance) for chosen in RECOMPUTED[recompute])
    cut = StageCut(balance, pipe.schedule.placement, again, selective=selective)
    there = profile.at(SAMPLES)
    lasting = tuple(replace(layer, momentary=0.0) for layer in there.layers)  # what `watched` sees
    return stage_costs(
        replace(there, layers=lasting),
        profile.tied,
        cut,
        RankDevices.of_pipelines(
            Cluster(num_devices=num_ranks, memory="1GB"), num_ranks, replicas=1
        ),
        in_halves=any(a.kind is Kind.I for row in pipe.schedule.actions for a in row),
        optimizer=optimizer,
    )


# of 12 combinations, such that each pair of choices is there for each model
@pytest.mark.parametrize(
    ("schedule", "num_ranks", "recompute"),
    [
        ("gpipe", 2, "never"),
        pytest.param("gpipe", 4, "always", marks=pytest.mark.slow),
        ("1f1b", 2, "always"),
        pytest.param("1f1b", 4, "never", marks=pytest.mark.slow),
        pytest.param("zb_h1", 2, "always", marks=pytest.mark.slow),
        ("zb_h1", 4, "never"),
        ("1f1b", 2, "selective"),
        pytest.param("zb_h1", 4, "selective", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", SLOW_ONE_LAST)
def test_predicted_activations_equal_those_of_a_running_pipeline(
    name: str, schedule: str, num_ranks: int, recompute: str
) -> None:
    """But for losses, 4 bytes for each micro-batch on the last rank, and the recomputed one's."""
    pipe = stepped(name, schedule=schedule, num_ranks=num_ranks, recompute=recompute)
    watch = watched(name, pipe)
    costs = costs_of(name, pipe, recompute=recompute)
    static = costs.static(pipe.schedule.placement)
    for rank, peak in enumerate(peak_memory(pipe.schedule.actions, pipe.schedule.placement, costs)):
        losses = 4 * (NUM_MICROBATCHES + 1) if rank == num_ranks - 1 else 0
        assert 0 <= watch.settled[rank] - (peak - static[rank]) <= losses


@pytest.mark.parametrize("schedule", ["gpipe", "zb_h1"])
def test_results_that_no_backward_needs_are_predicted_too(schedule: str) -> None:
    """They wait for the second forward, and take more memory than if nothing were recomputed."""
    pipe = stepped("sums", schedule=schedule, num_ranks=2, recompute="selective")
    watch = watched("sums", pipe)
    costs = costs_of("sums", pipe, recompute="selective")
    static = costs.static(pipe.schedule.placement)
    rows, placement = pipe.schedule.actions, pipe.schedule.placement
    for rank, peak in enumerate(peak_memory(rows, placement, costs)):
        predicted = peak - static[rank]
        losses = 4 * NUM_MICROBATCHES
        assert watch.settled[rank] - losses <= predicted
        assert watch.settled[rank] >= 0.8 * predicted
    kept, whole = (costs_of("sums", pipe, recompute=mode) for mode in ("selective", "never"))
    pairs = zip(kept.per_stage("activation", 2), whole.per_stage("activation", 2), strict=True)
    assert all(a > b for a, b in pairs)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", SLOW_ONE_LAST)
def test_predicted_static_memory_equals_that_of_a_running_pipeline(
    name: str, num_ranks: int
) -> None:
    """A weight that layers on several ranks use is on each of them, with a gradient by layer."""
    pipe = stepped(name, num_ranks=num_ranks)
    costs = costs_of(name, pipe, recompute="never")
    found: dict[str, list[float]] = {"parameters": [], "gradients": [], "optimizer_state": []}
    for numbers in pipe._session.assembly.layout.stages:
        modules = nn.ModuleList(pipe.layers.layers[number].module for number in numbers)
        optimizer = torch.optim.SGD(modules.parameters(), lr=0.1, momentum=0.9)
        optimizer.step()
        states = [state["momentum_buffer"] for state in optimizer.state.values()]
        by_layer = (weight.grad for module in modules for weight in module.parameters())
        found["parameters"].append(_num_bytes([*modules.parameters(), *modules.buffers()]))
        found["gradients"].append(_num_bytes([g for g in by_layer if g is not None]))
        found["optimizer_state"].append(_num_bytes(states))
    for part, sizes in found.items():
        assert costs.per_rank(part, pipe.schedule.placement) == sizes


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def test_costs_of_a_stage_from_its_layers_reads_and_sends() -> None:
    layers = (
        LayerCost(1, 2, 3, 10, 6, 100, 8, waiting=1, halving=0.5),
        LayerCost(2, 3, 4, 20, 15, 200, 0, waiting=2, halving=0.25),
        LayerCost(4, 5, 6, 40, 35, 100, 0, waiting=4),
    )
    values = (ValueCost(0, (1, 2), 5, unsaved=1), ValueCost(1, (2,), 7))
    cut = StageCut((1, 2), (0, 1), (False, False))
    joined = Cluster(2, "1TiB", levels=(Level("machine", 2, bandwidth=10, latency=0.5),))
    cluster = RankDevices.of_pipelines(joined, num_ranks=2, replicas=1)
    tied = (TiedParameter((0, 2), 100),)
    measurement = Measurement(1, layers, values)
    costs = stage_costs(measurement, tied, cut, cluster, in_halves=True, optimizer="adamw")
    assert costs.per_stage("forward", 2) == (1.5, 6.25)
    assert costs.per_stage("input_grad", 2) == (2, 8)
    assert costs.per_stage("weight_grad", 2) == (3, 10)
    assert costs.per_stage("transfer", 2) == (0.5 + 5 / 10, 0)
    assert costs.per_stage("activation", 2) == (10 + 1, 60 + 5)
    assert costs.per_stage("retained", 2) == (6, 50 + 5)
    assert costs.per_stage("waiting", 2) == (1, 6)
    assert costs.per_stage("parameters", 2) == (108, 300)  # on two ranks, so both hold the tied one
    assert costs.per_stage("optimizer_state", 2) == (200, 600)  # of parameters, not of buffers
    whole = stage_costs(measurement, tied, cut, cluster, in_halves=False, optimizer="sgd")
    assert whole.per_stage("forward", 2) == (1, 6)
    assert whole.per_stage("waiting", 2) == (0, 0)
    assert whole.per_stage("optimizer_state", 2) == (0, 0)
    again = StageCut((1, 2), (0, 1), (False, True))
    less = stage_costs(measurement, tied, again, cluster, in_halves=True, optimizer="sgd")
    assert less.per_stage("activation", 2) == (11, 5)
    assert less.per_stage("recompute", 2) == (0, 6)
    assert less.per_stage("working_set", 2) == (0, 60)
    assert less.per_stage("waiting", 2) == (1, 6 + 50)  # what was brought back for I stays until W


def test_a_weight_tied_within_a_rank_is_held_once() -> None:
    layers = (LayerCost(1, 1, 1, 0, 0, 100, 0),) * 2
    cut = StageCut((1, 1), (0, 0), (False, False))
    measurement = Measurement(1, layers, ())
    tied = (TiedParameter((0, 1), 100),)
    machines = RankDevices.of_pipelines(Cluster(1, "1TiB"), num_ranks=1, replicas=1)
    costs = stage_costs(measurement, tied, cut, machines, in_halves=False, optimizer="sgd")
    assert costs.per_stage("parameters", 2) == (100, 0)
