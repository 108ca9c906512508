"""Memory: schedules hold the activations that their papers say, and nothing is leaked.

Counted are the bytes of what layers wrote, as long as anybody holds them: a graph, a stage that
will recompute, a message on its way. Independently of that, what autograd saved.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import cross_entropy, mse_loss

from stageline.costs import Costs
from stageline.model.layers import LayerSequence
from stageline.pipeline import Pipeline
from stageline.schedules.build import build_schedule, schedule_names
from stageline.schedules.schedule import Schedule
from stageline.simulation.simulate import simulate

WIDTH = 8
SAMPLE = WIDTH * 4  # bytes of what a layer writes for a sample


def chain(num_layers: int) -> LayerSequence:
    """Layers that each save their input and write as many bytes."""
    torch.manual_seed(0)
    return LayerSequence.of([nn.Linear(WIDTH, WIDTH) for _ in range(num_layers)])


def step(pipe: Pipeline, num_samples: int) -> None:
    pipe.step(torch.randn(num_samples, WIDTH), torch.randn(num_samples, WIDTH))


class Held:
    """Counts the bytes of layer outputs by `owner(layer, call)`, now and at the peak."""

    def __init__(self, layers: LayerSequence, owner: Callable[[int, int], int]) -> None:
        self.owner = owner
        self.calls: Counter[int] = Counter()
        self.alive: dict[tuple[int, int], tuple[int, int]] = {}  # owner and bytes, by layer, call
        self.peak: Counter[int] = Counter()
        for number, layer in enumerate(layers):
            layer.module.register_forward_hook(self._noting(number))

    def _noting(self, layer: int) -> Callable[[nn.Module, Any, Tensor], None]:
        def note(_: nn.Module, __: Any, output: Tensor) -> None:
            key, storage = (layer, self.calls[layer]), output.untyped_storage()
            self.calls[layer] += 1
            self.alive[key] = self.owner(*key), storage.nbytes()
            weakref.finalize(storage, self.alive.pop, key)
            self.peak |= self.now()

        return note

    def now(self) -> Counter[int]:
        total: Counter[int] = Counter()
        for owner, size in list(self.alive.values()):
            total[owner] += size
        return total


@pytest.mark.parametrize("num_microbatches", [4, 8])
@pytest.mark.parametrize("layers_per_rank", [3, 6])
def test_gpipe_with_recomputation_holds_what_its_paper_says(
    num_microbatches: int, layers_per_rank: int
) -> None:
    """On each rank N + L/K · N/M: inputs of all micro-batches, and all layers of one."""
    layers = chain(4 * layers_per_rank)

    def rank(layer: int, call: int) -> int:
        """A stage's first output is the next stage's input; when recomputed it is its own."""
        is_input = (layer + 1) % layers_per_rank == 0 and call < num_microbatches
        return min(3, layer // layers_per_rank + is_input)

    held = Held(layers, rank)
    num_samples = 2 * num_microbatches
    pipe = Pipeline(
        layers,
        mse_loss,
        num_ranks=4,
        num_microbatches=num_microbatches,
        schedule="gpipe",
        balance=[layers_per_rank] * 4,
        recompute="always",
        backend="serial",
    )
    step(pipe, num_samples)
    held.peak[0] += num_samples * SAMPLE  # which the caller wrote
    formula = (num_samples + layers_per_rank * 2) * SAMPLE
    assert [held.peak[rank] for rank in range(3)] == [formula] * 3
    assert formula <= held.peak[3] <= formula + 2 * SAMPLE  # the output, until the next action


class Saved:
    """Counts the micro-batches that autograd saves tensors for, by stage, now and at the peak."""

    def __init__(self, pipe: Pipeline) -> None:
        self.placement = pipe.schedule.placement
        self.at_work = (0, 0)  # stage and micro-batch
        self.tensors: Counter[tuple[int, int]] = Counter()
        self.peak: Counter[int] = Counter()
        for stage, numbers in enumerate(pipe._session.assembly.layout.stages):
            first = pipe.layers.layers[numbers[0]].module
            first.register_forward_pre_hook(self._beginning(stage))

    def _beginning(self, stage: int) -> Callable[[nn.Module, Any], None]:
        microbatches = iter(range(1000))

        def begin(*_: object) -> None:
            self.at_work = stage, next(microbatches)

        return begin

    def pack(self, tensor: Tensor) -> Any:
        if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
            return tensor
        box = Box(tensor)
        self.tensors[self.at_work] += 1
        weakref.finalize(box, self.tensors.subtract, {self.at_work: 1})
        self.peak |= Counter(self.placement[stage] for stage, _ in +self.tensors)
        return box


class Box:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def unpack(kept: Any) -> Tensor:
    tensor: Tensor = kept.tensor if isinstance(kept, Box) else kept
    return tensor


def most_microbatches(schedule: str | Schedule) -> list[int]:
    """Return the peak number of saved micro-batches, out of eight, on each of four ranks."""
    pipe = Pipeline(
        chain(16), mse_loss, num_ranks=4, num_microbatches=8, schedule=schedule, backend="serial"
    )
    saved = Saved(pipe)
    with saved_tensors_hooks(saved.pack, unpack):
        step(pipe, 16)
    assert not +saved.tensors
    return [saved.peak[rank] for rank in range(4)]


def test_1f1b_holds_as_many_micro_batches_as_there_are_ranks_ahead() -> None:
    assert most_microbatches("1f1b") == [4, 3, 2, 1]


def test_gpipe_holds_all_micro_batches() -> None:
    assert most_microbatches("gpipe") == [8, 8, 8, 8]


@pytest.mark.parametrize("schedule", schedule_names(synchronous=True))
def test_every_schedule_holds_what_its_simulation_says(schedule: str) -> None:
    built = build_schedule(schedule, num_ranks=4, num_microbatches=8)
    assert most_microbatches(built) == list(simulate(built, Costs()).peak_activations)


@pytest.mark.parametrize("backend", [pytest.param("serial", marks=pytest.mark.slow), "threads"])
@pytest.mark.parametrize("schedule", ["zbv", pytest.param("1f1b", marks=pytest.mark.slow)])
def test_two_hundred_steps_hold_no_more_than_twenty(schedule: str, backend: str) -> None:
    layers = chain(4)
    held = Held(layers, lambda *_: 0)
    pipe = Pipeline(
        layers, mse_loss, num_ranks=2, num_microbatches=4, schedule=schedule, backend=backend
    )
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    num_tensors, num_objects = dict[int, int](), dict[int, int]()
    for number in range(1, 201):
        step(pipe, 8)
        optimizer.step()
        optimizer.zero_grad()
        assert not held.now()
        if number in (20, 200):
            gc.collect()
            num_objects[number] = len(gc.get_objects())
            num_tensors[number] = sum(issubclass(type(o), Tensor) for o in gc.get_objects())
    pipe.close()
    assert num_tensors[200] == num_tensors[20]
    assert num_objects[200] < num_objects[20] + 180  # not one of any kind for each step


def test_a_kept_result_holds_its_losses_only() -> None:
    pipe = Pipeline(chain(2), mse_loss, num_ranks=2, num_microbatches=2, backend="serial")
    results, inputs = [], []
    for _ in range(5):
        x = torch.randn(4, WIDTH)
        inputs.append(weakref.ref(x.untyped_storage()))
        results.append(pipe.step(x, torch.zeros(4, WIDTH)))
        del x
    assert [storage() for storage in inputs[:-1]] == [None] * 4
    assert all(float(result.loss) > 0 for result in results)


def test_a_split_backward_holds_no_more_than_a_whole_one() -> None:
    """In both, the first rank has four micro-batches in flight; Tanh saves its output."""
    peaks = []
    for schedule in ("1f1b", "zb_h1"):
        layers = LayerSequence.of([m for x in chain(8) for m in (x.module, nn.Tanh())])
        held = Held(layers, lambda layer, _: layer // 4)
        pipe = Pipeline(
            layers,
            mse_loss,
            num_ranks=4,
            num_microbatches=8,
            schedule=schedule,
            balance=[4] * 4,
            backend="serial",
        )
        step(pipe, 16)
        peaks.append(held.peak[0])
    assert peaks[1] <= peaks[0] + 2 * SAMPLE  # one tensor more may be passing through


def test_an_output_is_released_once_its_loss_is_computed() -> None:
    """Cross entropy saves probabilities, not the logits."""
    layers = chain(4)
    held = Held(layers, lambda layer, _: layer)
    pipe = Pipeline(
        layers, cross_entropy, num_ranks=2, num_microbatches=8, schedule="gpipe", backend="serial"
    )
    pipe.step(torch.randn(8, WIDTH), torch.randint(WIDTH, (8,)))
    assert held.peak[3] <= 2 * SAMPLE


def test_evaluation_holds_what_one_layer_reads_and_writes() -> None:
    """As nn.Sequential does, for any number of layers in a stage."""
    layers = chain(16)
    held = Held(layers, lambda *_: 0)
    pipe = Pipeline(layers, mse_loss, num_ranks=2, num_microbatches=1, backend="serial")
    pipe.eval()(torch.randn(1, WIDTH))
    assert held.peak[0] <= 3 * SAMPLE
