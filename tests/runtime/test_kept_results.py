"""Selective recomputation: costly operators run once, with the bits of a plain loop."""

from __future__ import annotations

import importlib
import itertools
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss, scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import stageline
from stageline.errors import StageError
from stageline.model.layers import LayerSequence
from stageline.options import Options
from stageline.pipeline import Pipeline
from stageline.planning.profiling.profiled_model import ProfiledModel
from stageline.schedules.build import schedule_names
from stageline.zoo.cases import BACKENDS, Case, differences, pipelined, plainly

WIDTH = 128  # sums of so many products are kept
BATCH, NUM_MICROBATCHES = 8, 4


class Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Count the operators that reach their kernels."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def operators_of_a_step(make: Callable[[], nn.Module], shape: tuple[int, ...], mode: str) -> Calls:
    """Count those of a second step; in the first one layers are observed."""
    torch.manual_seed(0)
    layers = LayerSequence.of([make(), make()])
    x = torch.randn(BATCH, *shape)
    options: dict[str, Any] = {"num_ranks": 2, "num_microbatches": NUM_MICROBATCHES}
    with Pipeline(layers, mse_loss, recompute=mode, backend="serial", **options) as pipe:
        for _ in range(2):
            pipe.step(x, torch.zeros_like(x))
        calls = Calls()
        with calls:
            pipe.step(x, torch.zeros_like(x))
    return calls


def case_of(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> Case:
    torch.manual_seed(0)
    layers = LayerSequence.of([make() for _ in range(4)])
    batches = tuple((torch.randn(n, *shape), torch.randn(n, *shape)) for n in (8, 5, 8))
    return Case(layers, mse_loss, batches)


def linear() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.Dropout())


def convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())


class Attention(nn.Module):
    """Attention with a mask, which is passed by keyword."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        self.project = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).view(*x.shape[:2], 3, 2, -1).permute(2, 0, 3, 1, 4)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        y = scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=self.dropout)
        return x + y.transpose(1, 2).reshape(x.shape)


@pytest.mark.parametrize(
    ("make", "shape", "costly", "cheap"),
    [
        (linear, (WIDTH,), "aten::addmm", "aten::gelu"),
        (convolution, (16, 8, 8), "aten::convolution", "aten::relu"),
        (
            Attention,
            (6, WIDTH),
            "aten::_scaled_dot_product_flash_attention_for_cpu",
            "aten::_unsafe_view",
        ),
    ],
)
def test_costly_operators_run_once_and_others_twice(
    make: Callable[[], nn.Module], shape: tuple[int, ...], costly: str, cheap: str
) -> None:
    never, selective, always = (
        operators_of_a_step(make, shape, mode).counts for mode in ("never", "selective", "always")
    )
    assert 0 < selective[costly] == never[costly]
    assert always[costly] == 2 * never[costly]
    assert selective[cheap] == always[cheap]


class Compiled(nn.Module):
    """A layer with a function that is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.after: Callable[[Tensor], Tensor] = torch.compile(
            lambda x: torch.tanh(x) * 2, backend="eager"
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.inner(x))


def test_the_compiler_of_a_layer_does_not_compile_what_stageline_does_around_operators() -> None:
    dynamo = importlib.import_module("torch._dynamo.utils")  # takes seconds
    dynamo.clear_compilation_metrics()
    layers = LayerSequence.of([Compiled() for _ in range(2)])
    x = torch.randn(BATCH, WIDTH)
    options = Options(check_streams=True)
    given: dict[str, Any] = {"num_ranks": 2, "num_microbatches": 4, "recompute": "selective"}
    with Pipeline(layers, mse_loss, options=options, **given) as pipe:
        for _ in range(2):
            pipe.step(x, x)
    compiled = {each.co_filename or "" for each in dynamo.get_compilation_metrics()}
    package = str(Path(stageline.__file__).parent)
    assert [name for name in compiled if name.startswith(package)] == []


def test_narrow_products_run_twice() -> None:
    """A sum of 32 products is as quickly computed as fetched from memory."""

    def narrow() -> nn.Module:
        return nn.Sequential(nn.Linear(32, 32), nn.Tanh())

    always, selective = (
        operators_of_a_step(narrow, (32,), mode).counts for mode in ("always", "selective")
    )
    assert selective["aten::addmm"] == always["aten::addmm"]


class InPlace(nn.Module):
    """A layer that changes the result of a product in place."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x)
        return found.relu_() + 1


class WritesInto(nn.Module):
    """A layer that computes a constant into a tensor of its own, with `out=`."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(WIDTH, WIDTH))
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found = torch.full_like(x, -1.0)
        with torch.no_grad():
            torch.mm(x, self.table, out=found)
        wanted: Tensor = self.inner(x)
        return wanted + found.tanh()


class Changes(nn.Module):
    """A layer that changes the result of a product in memory that it shares with another tensor."""

    def __init__(self, change: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.change = change
        self.inner = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x)
        self.change(found)
        return found.tanh()


class Scores(nn.Module):
    """Attention by hand, which scales its scores in place; a product of batches has no version."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        scores = (self.inner(x) @ x.transpose(1, 2)).div_(WIDTH**0.5)
        found: Tensor = x + scores.softmax(-1) @ x
        return found


class Mapped(nn.Module):
    """A layer that changes a product in place inside of `vmap`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = torch.func.vmap(lambda row: self.inner(row).mul_(0.5))(x)
        return found.tanh()


class Remembers(nn.Module):
    """A layer that changes in place what it made of the last micro-batch, as a memory does."""

    memory: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("memory", torch.zeros(1))
        self.inner = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x)
        self.memory.mul_(0.5)
        total = found + self.memory.sum()
        self.memory = found.detach()
        return total


class OnRows(nn.Module):
    """A layer that multiplies with a sparse matrix, which has no strides."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings(action="ignore"):  # rows are in beta state
            self.rows = torch.randn(WIDTH, WIDTH).relu().to_sparse_csr()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner((self.rows @ x.t()).t())
        return found


class WithoutGradient(nn.Module):
    """A layer that computes a constant; compiled code runs like this as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            found: Tensor = self.inner(x)
        return x + found


class ReusesMemory(torch.autograd.Function):
    """Compute as compiled code does: its kernels change a result without a call of torch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        product = x.mm(weight)
        product.numpy()[...] += 1
        return product

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradients[0] @ weight.t(), x.t() @ gradients[0]


class LikeCompiled(nn.Module):
    """A layer with such a function."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = ReusesMemory.apply(x, self.weight)  # type: ignore[no-untyped-call]  # torch's own
        return found.tanh()


class Varying(nn.Module):
    """A layer that makes one call more in every other forward, and so in many recomputations."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.calls = itertools.count()  # a recomputation does not put it back

    def forward(self, x: Tensor) -> Tensor:
        if next(self.calls) % 2:
            with torch.no_grad():
                x.mm(self.first.weight)
        found: Tensor = self.second(self.first(x)).tanh()
        return found


class OwnCheckpoint(nn.Module):
    """A layer that recomputes a part of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()

    def forward(self, x: Tensor) -> Tensor:
        found = checkpoint(self.inner, x, use_reentrant=False)
        assert isinstance(found, Tensor)
        return x + found


class OwnGradient(nn.Module):
    """A layer that differentiates in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x if x.requires_grad else x.detach().requires_grad_()
        with torch.enable_grad():
            energy = self.inner(x).tanh().pow(2).sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return x - 0.1 * force


class Recurrent(nn.Module):
    """A layer with a recurrent network, whose products are inside of torch's own operators."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x.unsqueeze(1))[0]
        return found.squeeze(1)


def scale_data(found: Tensor) -> None:
    found.data.mul_(0.5)


def replace_data(found: Tensor) -> None:
    found.data = found.data * 0.5


def scale_in_group(found: Tensor) -> None:
    with torch.no_grad():
        torch._foreach_mul_([found], 0.5)


FLAT = (WIDTH,)
DEEP = (4, WIDTH)  # of such inputs, a product without a bias is in memory that has no version
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (linear, FLAT),
    "convolution": (convolution, (16, 8, 8)),
    "attention": (Attention, (6, WIDTH)),
    "attention with dropout": (lambda: Attention(0.2), (6, WIDTH)),
    "in place": (InPlace, FLAT),
    "first in place": (lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)), FLAT),
    "out=": (WritesInto, FLAT),
    "in place, without a bias": (lambda: Changes(lambda found: found.mul_(0.5)), DEEP),
    "data in place": (lambda: Changes(scale_data), FLAT),
    "other data": (lambda: Changes(replace_data), FLAT),
    "in place in a group": (lambda: Changes(scale_in_group), FLAT),
    "scores in place": (Scores, DEEP),
    "in place in vmap": (Mapped, FLAT),
    "remembers": (Remembers, DEEP),
    "sparse rows": (OnRows, FLAT),
    "like compiled": (LikeCompiled, FLAT),
    "varying": (Varying, FLAT),
    "own checkpoint": (OwnCheckpoint, FLAT),
    "own gradient": (OwnGradient, FLAT),
    "recurrent": (Recurrent, FLAT),
}


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", MODELS)
def test_layers_of_all_kinds_train_to_the_same_bits(name: str, backend: str, schedule: str) -> None:
    wanted = plainly(case_of(*MODELS[name]), NUM_MICROBATCHES)
    options: dict[str, Any] = {"schedule": schedule, "backend": backend, "num_ranks": 2}
    found = pipelined(case_of(*MODELS[name]), NUM_MICROBATCHES, recompute="selective", **options)
    assert differences(found, wanted) == []


@pytest.mark.parametrize("accumulate", ["fused", torch.float32])
def test_other_ways_to_accumulate_take_kept_results_too(accumulate: Any) -> None:
    make = MODELS["linear"]
    kept, dropped = (
        pipelined(case_of(*make), NUM_MICROBATCHES, num_ranks=2, recompute=mode, accumulate=way)
        for mode, way in (("selective", accumulate), ("never", accumulate))
    )
    assert differences(kept, dropped) == []


@pytest.mark.parametrize("schedule", [name for name in schedule_names() if "pipedream" in name])
def test_streams_take_results_of_the_same_weights(schedule: str) -> None:
    """A micro-batch's second forward uses the version of the weights that its first one used."""
    found = []
    for mode in ("never", "selective"):
        torch.manual_seed(0)
        layers = LayerSequence.of([linear() for _ in range(4)])
        batches = [(torch.randn(8, WIDTH), torch.randn(8, WIDTH)) for _ in range(5)]
        options: dict[str, Any] = {"num_ranks": 2, "num_microbatches": NUM_MICROBATCHES}
        with Pipeline(
            layers,
            mse_loss,
            schedule=schedule,
            recompute=mode,
            optimizer_fn=lambda weights: torch.optim.SGD(weights, 0.1),
            **options,
        ) as pipe:
            for _ in pipe.run(batches):
                pass
            found.append({name: value.clone() for name, value in pipe.state_dict().items()})
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize(
    ("make", "num_kept"),
    [
        (lambda: nn.Linear(WIDTH, WIDTH), 1),
        (lambda: nn.Linear(32, WIDTH), 0),
        (InPlace, 0),
        (WritesInto, 1),
        (lambda: Changes(scale_data), 0),
        (WithoutGradient, 0),
    ],
)
def test_what_is_kept_is_what_costs_time_and_can_be_used(
    make: Callable[[], nn.Module], num_kept: int
) -> None:
    """A result that was changed in place would only take memory."""
    layer = make()
    width = next(layer.parameters()).shape[1]
    x = torch.randn(BATCH, width)
    runner = ProfiledModel.of(layer, x, None, None).runner(BATCH)
    runner.run_all()
    kept = runner.keep_results(0).results
    assert [tuple(tensor.shape) for tensor in kept] == [(BATCH, WIDTH)] * num_kept
    assert not any(tensor.requires_grad for tensor in kept)  # they hold no graph


class LateChange(nn.Module):
    """A layer that starts to change its input in place in its third forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.calls = itertools.count()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x.mul_(0.5) if next(self.calls) >= 2 else x * 0.5)
        return found


def test_what_is_kept_and_sent_is_not_changed_by_its_reader() -> None:
    """The reader's copies would be too late: it left its input unchanged when it first ran."""
    layers = LayerSequence.of([nn.Linear(WIDTH, WIDTH, bias=False), LateChange()])
    x = torch.randn(BATCH, 4, WIDTH)
    options: dict[str, Any] = {"num_ranks": 2, "num_microbatches": 2, "backend": "serial"}
    with Pipeline(layers, mse_loss, recompute=["selective", "never"], **options) as pipe:
        pipe.step(x, x)
        with pytest.raises(StageError, match="changed its input in place, but did not when it"):
            pipe.step(x, x)


class Watched(nn.Module):
    """Two products, and a function that is called between them."""

    def __init__(self, between: Callable[[], None]) -> None:
        super().__init__()
        self.between = between
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.between()
        found: Tensor = self.second(x)
        return found


def test_results_are_freed_one_by_one_as_they_are_taken() -> None:
    """The second forward does not hold those of all layers beside what it saves."""
    references: list[weakref.ref[Tensor]] = []
    alive: list[bool] = []
    layer = Watched(lambda: alive.extend(known() is not None for known in references))
    model = LayerSequence.of([layer])
    runner = ProfiledModel.of(model, torch.randn(BATCH, WIDTH), None, None).runner(BATCH)
    runner.run_all()
    run = runner.keep_results(0)
    references.extend(map(weakref.ref, run.results))
    runner.recompute(run)
    assert alive == [False, True]
