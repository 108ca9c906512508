"""Pipeline: the front door. Wrap a model, call `step`, get what a plain loop would give."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stageline.errors import BatchError, ModelError, ScheduleError
from stageline.model.layers import CHAIN, INPUT, Layer, LayerSequence, Value
from stageline.model.split import cut
from stageline.report.spans import Span
from stageline.report.timeline import Timeline
from stageline.runtime import microbatches
from stageline.runtime.ambient import Ambient
from stageline.runtime.batch_norm import MODES as batch_norm_modes  # noqa: N811
from stageline.runtime.drivers import Driver, Serial, Threads
from stageline.runtime.executor import Executor, Step
from stageline.runtime.parity import compare, left_as_it_was, plain_step
from stageline.runtime.stage import Stage, Target
from stageline.runtime.tied import TiedWeights
from stageline.schedules.action import Action, Kind
from stageline.schedules.build import build_schedule
from stageline.schedules.check import check
from stageline.schedules.edges import Edge
from stageline.schedules.lower import lower
from stageline.schedules.schedule import Schedule

RECOMPUTE = ("never", "always", "except_last")  # activations: keep them, or run forward again
LossFunction = Callable[[Any, Any], torch.Tensor]


@dataclass(frozen=True)
class StepResult:
    """What a step gives back, beside the gradients in the parameters."""

    losses: tuple[torch.Tensor, ...]  # by micro-batch
    weights: tuple[float, ...]

    @property
    def loss(self) -> torch.Tensor:
        """The loss of the mini-batch: the mean over its samples."""
        return torch.stack(
            [loss * weight for loss, weight in zip(self.losses, self.weights, strict=True)]
        ).sum()


class Pipeline:
    """A model cut into stages that work on several micro-batches at once.

    `step` adds to `.grad` what a plain loop over the same micro-batches adds, bit for bit; the
    optimizer is yours. `loss_fn(output, target)` returns the mean over its samples; or their sum,
    if `count_fn(target)` says how many of them count.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    >>> pipe = Pipeline(model, nn.functional.mse_loss, num_ranks=2, num_microbatches=4)
    >>> result = pipe.step(torch.ones(8, 4), torch.zeros(8, 1))
    >>> tuple(model[0].weight.grad.shape)
    (8, 4)
    """

    def __init__(
        self,
        model: LayerSequence | nn.Module | Iterable[Layer | nn.Module],
        loss_fn: LossFunction,
        *,
        num_ranks: int,
        num_microbatches: int,
        schedule: str | Schedule = "1f1b",
        balance: Sequence[int] | None = None,
        recompute: str | Sequence[str] = "never",
        backend: str = "threads",
        batch_norm: str = "minibatch",
        count_fn: Callable[[Any], float | torch.Tensor] | None = None,
        seed: int = 0,
    ) -> None:
        if batch_norm not in batch_norm_modes:
            raise ModelError(f"batch_norm is {batch_norm!r}, but takes 'minibatch' or 'microbatch'")
        self.layers, self.loss_fn = LayerSequence.of(model), loss_fn
        self.batch_norm = batch_norm
        self.schedule = _schedule(schedule, num_ranks, num_microbatches)
        cuts = cut(self.layers, self.schedule.num_stages, balance)
        edges, sent = _edges(self.layers, cuts)
        self.tied = TiedWeights.of(self.layers)
        stages = [
            Stage(self.layers, numbers, sent[stage], self.tied, batch_norm)
            for stage, numbers in enumerate(cuts)
        ]
        modes = _recompute_modes(recompute, len(cuts))
        self.executor = Executor(lower(self.schedule, edges), self.layers, stages, modes)
        self.seed, self.num_steps, self.count_fn = seed, 0, count_fn
        self._traced: dict[int, list[Span]] = {}  # the spans of the last step, by rank
        self.driver = _driver(backend, num_ranks)

    def step(self, inputs: Any, target: Any) -> StepResult:
        """One mini-batch forward and backward: gradients are added to those that are there."""
        step = self._training_step(inputs, target)
        self._run(step)
        self.num_steps += 1
        losses = tuple(step.losses[i] for i in range(len(step.targets)))
        return StepResult(losses, tuple(target.weight for target in step.targets))

    def verify(self, inputs: Any, target: Any) -> None:
        """Raise `ParityError` unless a step on this batch has the bits of a plain loop.

        Compared are all gradients and buffers. The model is left as it was; a copy of it and a
        second set of gradients must fit in memory.
        """
        plain = copy.deepcopy(self.layers)
        for tensor in nn.ModuleList(layer.module for layer in plain.layers).parameters():
            tensor.grad = None
        batch = copy.deepcopy((inputs, target))  # a first layer that works in place would change it
        plain_step(plain, self._training_step(*batch), self.batch_norm)
        with left_as_it_was(self.layers):
            self._run(self._training_step(inputs, target))
            compare(self.layers, plain)

    def _training_step(self, inputs: Any, target: Any) -> Step:
        pieces = self._pieces(inputs, target)
        targets = microbatches.cut(target, pieces)
        weights = self._weights(pieces, targets)
        step = self._start(microbatches.cut(inputs, pieces))
        parts = zip(targets, weights, strict=True)
        step.targets = [Target(self.loss_fn, part, weight) for part, weight in parts]
        return step

    def __call__(self, inputs: Any) -> Any:
        """The output for a batch, without gradients: for evaluation."""
        if torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters()):
            raise ModelError(
                "the pipeline was called with gradients enabled, but its output has none: "
                "call it under torch.no_grad(), or train with step()"
            )
        step = self._start(microbatches.cut(inputs, self._pieces(inputs)))
        step.forward_only = True
        self._run(step)
        return microbatches.join([step.outputs[i] for i in range(len(step.inputs))])

    def parameters(self) -> Iterator[nn.Parameter]:
        """Each once, in the order of the layers."""
        modules = nn.ModuleList(layer.module for layer in self.layers.layers)
        return modules.parameters()

    def state_dict(self) -> dict[str, Any]:
        """Parameters and buffers under the names that they have in the model."""
        return {
            f"{layer.name}.{name}": tensor
            for layer in self.layers.layers
            for name, tensor in layer.module.state_dict().items()
        }

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale all gradients down to a global norm; gives back the norm that they had."""
        return nn.utils.clip_grad_norm_(self.parameters(), max_norm)

    @contextmanager
    def trace(self) -> Iterator[Timeline]:
        """The measured timeline of the last step in the block, in ms; empty until it ends."""
        timeline = Timeline(((),) * self.schedule.num_ranks, self.schedule.placement)
        before, self._traced = self._traced, {}
        try:
            yield timeline
        finally:
            rows = (tuple(self._traced.get(r, ())) for r in range(self.schedule.num_ranks))
            object.__setattr__(timeline, "spans", tuple(rows))
            object.__setattr__(timeline, "name", f"{self.schedule.name}, measured")
            self._traced = before

    def close(self) -> None:
        """End the threads; a pipeline that is garbage collected ends them as well."""
        self.driver.close()

    def _pieces(self, *batches: Any) -> list[int]:
        length = microbatches.num_samples(*batches)
        return microbatches.sizes(length, self.schedule.num_microbatches)

    def _weights(self, pieces: list[int], targets: list[Any]) -> list[float]:
        """What each micro-batch's loss counts for: its share of samples, or 1 / all that count."""
        if self.count_fn is None:
            return [size / sum(pieces) for size in pieces]
        total = sum(float(self.count_fn(part)) for part in targets)
        return [1.0 / total if total else 0.0] * len(pieces)

    def _start(self, parts: list[Any]) -> Step:
        inputs = [self._named(part) for part in parts]
        return Step(inputs, [], self.seed, self.num_steps, Ambient.here())

    def _run(self, step: Step) -> None:
        self.tied.refresh()
        try:
            self.driver.run(self.executor, step)
            self.tied.add_gradients()
            for stage in self.executor.stages:
                stage.finish()
        finally:
            for stage in self.executor.stages:
                stage.clear()
        self._traced.clear()
        self._traced.update(step.spans)

    def _named(self, inputs: Any) -> Mapping[str, Any]:
        """Inputs by name: those of a dict, or the one that the first layer reads."""
        names = {v.name for row in self.layers.sources for v in row if v.writer == INPUT}
        found = inputs if names != {CHAIN} and isinstance(inputs, dict) else {CHAIN: inputs}
        if missing := sorted(names - found.keys()):
            raise BatchError(
                f"inputs have {', '.join(map(str, found))}, but layers read {', '.join(missing)} "
                "before any layer writes it: give inputs as a dict with these names"
            )
        return found


def _schedule(schedule: str | Schedule, num_ranks: int, num_microbatches: int) -> Schedule:
    if isinstance(schedule, str):
        return build_schedule(schedule, num_ranks=num_ranks, num_microbatches=num_microbatches)
    check(schedule)
    sizes = (schedule.num_ranks, schedule.num_microbatches)
    if sizes != (num_ranks, num_microbatches):
        raise ScheduleError(
            f"the schedule is for {sizes[0]} ranks and {sizes[1]} micro-batches, but the pipeline "
            f"for {num_ranks} and {num_microbatches}: use the same"
        )
    _check_ascending(schedule)
    return schedule


def _check_ascending(schedule: Schedule) -> None:
    """The sum of gradients depends on its order in the last bits, so there is one order for all."""
    latest: dict[tuple[int, bool], Action] = {}
    for row in schedule.actions:
        for action in row:
            if action.kind is not Kind.F:
                sort = (action.stage, action.kind is Kind.W)  # weights that I cannot leave to W too
                before = latest.setdefault(sort, action)
                if before.microbatch > action.microbatch:
                    raise ScheduleError(
                        f"{before} comes before {action}, but gradients are added in ascending "
                        "order of micro-batches in every schedule: swap them"
                    )
                latest[sort] = action


def _recompute_modes(recompute: str | Sequence[str], num_stages: int) -> tuple[str, ...]:
    modes = (recompute,) * num_stages if isinstance(recompute, str) else tuple(recompute)
    if len(modes) != num_stages or not set(modes) <= set(RECOMPUTE):
        raise ModelError(
            f"recompute is {recompute!r}, but {num_stages} stages take one of "
            f"{', '.join(map(repr, RECOMPUTE))}, or one for each stage"
        )
    return modes


def _driver(backend: str, num_ranks: int) -> Driver:
    if backend == "serial":
        return Serial()
    if backend == "threads":
        return Threads(num_ranks)
    raise ScheduleError(f"backend is {backend!r}, but there are 'serial' and 'threads': use one")


def _edges(layers: LayerSequence, cuts: tuple[range, ...]) -> tuple[list[Edge], list[set[Value]]]:
    """Which stage reads from which, and for each stage the values that others read."""
    home = {number: stage for stage, numbers in enumerate(cuts) for number in numbers}
    edges: dict[Edge, None] = {}
    sent: list[set[Value]] = [set() for _ in cuts]
    for number, values in enumerate(layers.sources):
        for value in values:
            if value.writer != INPUT and home[value.writer] != home[number]:
                edges[home[value.writer], home[number]] = None
                sent[home[value.writer]].add(value)
    return list(edges), sent
