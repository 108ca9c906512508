"""Optimizers that the pipeline owns: one for each stage, stepped when its gradients are complete.

A stage whose gradients are not finite skips its step, and the result says so. Nobody else may step
these optimizers or change their options while mini-batches are on their way: stages are at
different steps then.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from threading import get_ident
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from stageline.errors import ModelError
from stageline.runtime.accelerators.host_waits import HostRead, read_on_host
from stageline.runtime.exactness.gradient_types import gradient_type, with_another_gradient_type
from stageline.runtime.optimizers.clipping import gradient_norm, total_norm
from stageline.runtime.optimizers.undo import check_undoable
from stageline.runtime.placement.layout import Layout
from stageline.torch_private import mark_as_stepped

if TYPE_CHECKING:
    from stageline.runtime.optimizers.weight_versions import Versions

OptimizerFunction = Callable[[list[nn.Parameter]], Optimizer]
SchedulerFunction = Callable[[Optimizer], LRScheduler]
GroupOptions = list[dict[str, Any]]  # by parameter group
# what schedulers and people change; in others some optimizers keep counts of their own
WATCHED = ("lr", "momentum", "betas", "weight_decay")


class Update(NamedTuple):
    """The effect of a step on a stage."""

    is_skipped: bool
    # of the change of its weights, or of their gradients if it was not watched; on its device
    norm: Tensor | float
    is_redone: bool = False  # it was made as if nothing had to be clipped, and made again


@dataclass
class StageOptimizer:
    """The optimizer of one stage. State: the options that its groups should have."""

    optimizer: Optimizer
    scheduler: LRScheduler | None
    known: GroupOptions

    @staticmethod
    def of(
        parameters: Iterable[nn.Parameter],
        optimizer_fn: OptimizerFunction,
        scheduler_fn: SchedulerFunction | None,
    ) -> StageOptimizer | None:
        """Return None for a stage that has nothing to train."""
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        if not trained:
            return None
        optimizer = optimizer_fn(trained)
        if not isinstance(optimizer, Optimizer):
            raise ModelError(
                f"optimizer_fn returned {optimizer!r} for the parameters of a stage, but has to "
                "return an optimizer: optimizer_fn=lambda params: SGD(params, lr=0.1)"
            )
        scheduler = scheduler_fn(optimizer) if scheduler_fn else None
        return StageOptimizer(optimizer, scheduler, group_options(optimizer))

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def external_change(self) -> str | None:
        """Return what someone else did to the options, in words, or None."""
        for old, new in zip(self.known, group_options(self.optimizer), strict=False):
            for name, value in old.items():
                if new.get(name) != value:
                    return f"{name} was changed from {value} to {new.get(name)}"
        return None

    def restore(self) -> None:
        """Undo external changes of the options."""
        for group, options in zip(self.optimizer.param_groups, self.known, strict=False):
            group.update(options)

    def after_step(self) -> None:
        self.optimizer.zero_grad()
        if self.scheduler is not None:
            # or torch warns of the wrong order if the very first step is skipped
            mark_as_stepped(self.optimizer)
            self.restore()
            self.known = []  # the caller may look from another thread, while they change
            self.scheduler.step()
            self.known = group_options(self.optimizer)


def group_options(optimizer: Optimizer) -> GroupOptions:
    return [
        {name: group[name] for name in WATCHED if isinstance(group.get(name), int | float | tuple)}
        for group in optimizer.param_groups
    ]


class StageOptimizers:
    """The optimizers of this process's stages. State: what others were seen to do to them."""

    def __init__(
        self, own: Mapping[int, StageOptimizer | None], max_norm: float | None, *, measures: bool
    ) -> None:
        self.own = own  # by stage; None if it has nothing to train
        self.max_norm = math.inf if max_norm is None else max_norm
        self.measures = measures  # how much weights change
        self.change: str | None = None  # an external change, in words
        # with the thread, because the caller may step an optimizer while its rank steps it, too
        self.at_work: set[tuple[int, Optimizer]] = set()
        self.release = weakref.finalize(self, self._refuse_others())

    @staticmethod
    def of(
        layout: Layout,
        optimizer_fn: OptimizerFunction,
        scheduler_fn: SchedulerFunction | None,
        max_norm: float | None,
        *,
        measures: bool,
    ) -> StageOptimizers:
        """Make an optimizer for each stage here, on the weights that no earlier stage has."""
        own: dict[int, StageOptimizer | None] = {}
        taken: set[nn.Parameter] = set()
        for stage, numbers in enumerate(layout.stages):
            if layout.is_here(numbers[0]):
                fresh = [p for p in layout.stage_parameters(stage) if p not in taken]
                taken |= set(fresh)
                own[stage] = StageOptimizer.of(fresh, optimizer_fn, scheduler_fn)
        return StageOptimizers(own, max_norm, measures=measures)

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        return tuple(own.optimizer for own in self.own.values() if own is not None)

    @property
    def schedulers(self) -> list[LRScheduler]:
        return [own.scheduler for own in self.own.values() if own and own.scheduler]

    def parameters_of(self, stages: Iterable[int]) -> list[nn.Parameter]:
        own = (self.own.get(stage) for stage in stages)
        return [parameter for each in own if each for parameter in each.parameters]

    @property
    def is_undoable(self) -> bool:
        """Return whether a step of every optimizer here can be taken back."""
        try:
            for optimizer in self.optimizers:
                check_undoable(optimizer)
        except ModelError:
            return False
        return True

    def begin(self) -> None:
        """Begin a stream: from now on nobody else may change the options."""
        self.change = None
        for own in self.own.values():
            if own is not None:
                own.known = group_options(own.optimizer)

    def end(self) -> None:
        """End a stream: options that someone else changed, and was told so, are restored."""
        for own in self.own.values():
            if own is not None and self.change is not None:
                own.restore()

    def check(self) -> None:
        """Raise if someone else changed an optimizer since the stream began."""
        for stage, own in self.own.items():
            if own is not None:
                self._look_for_change(stage, own)
        if self.change is not None:
            raise ModelError(
                f"{self.change}, in the middle of a stream in which every stage is at another "
                "step: give Pipeline a scheduler_fn=, which steps with each stage, or change it "
                "between two streams"
            )

    def prepare(self, stage: int) -> None:
        """Make sure that a stage's options are those that they should be."""
        own = self.own[stage]
        if own is not None:
            self._look_for_change(stage, own)
            own.restore()

    def step(
        self, stage: int, depth: int, versions: Versions | None, total: Tensor | None = None
    ) -> Update:
        """Step a stage's optimizer; `depth` older versions of its weights stay in use.

        Skip the step if gradients are not finite: those of the stage, or of all ranks if their
        `total` norm is known.
        """
        self.prepare(stage)
        own = self.own[stage]
        parameters = own.parameters if own is not None else []
        norm = _gradient_norm(parameters)
        decisive = norm if total is None else total
        is_finite = math.isfinite(read_on_host(decisive, HostRead.FINITE_GRADIENTS))
        if own is None:
            return Update(not is_finite, decisive)
        if is_finite:
            before = [p.data if depth else p.data.clone() for p in parameters if self.measures]
            if versions is not None:
                versions.begin_step(depth)
            with self.stepping(own.optimizer):
                own.optimizer.step()
            if versions is not None:
                versions.end_step(depth)
            norm = _distance(parameters, before) if before else norm
        elif versions is not None:
            versions.skip_step(depth)
        own.after_step()
        return Update(not is_finite, norm if is_finite else decisive)

    @contextmanager
    def stepping(self, optimizer: Optimizer) -> Iterator[None]:
        """Allow this thread to step one of our own optimizers."""
        step = get_ident(), optimizer
        self.at_work.add(step)
        try:
            yield
        except RuntimeError as error:
            weights = (p for group in optimizer.param_groups for p in group["params"])
            if (weight := with_another_gradient_type(weights)) is not None:
                raise _cannot_step(optimizer, weight, error) from error
            raise
        finally:
            self.at_work.discard(step)

    def _look_for_change(self, stage: int, own: StageOptimizer) -> None:
        found = own.external_change()
        if found and self.change is None:
            self.change = f"{found} on stage {stage}"

    def _refuse_others(self) -> Callable[[], None]:
        """Refuse steps of the caller's optimizers on our weights; return what ends that."""
        owned = {parameter for own in self.own.values() if own for parameter in own.parameters}
        at_work = self.at_work

        def refuse(optimizer: Optimizer, *_: Any) -> None:
            if (get_ident(), optimizer) not in at_work and any(
                parameter in owned
                for group in optimizer.param_groups
                for parameter in group["params"]
            ):
                raise ModelError(
                    f"{type(optimizer).__name__}.step() was called for weights that the pipeline "
                    "steps itself, when their gradients are complete: omit it"
                )

        return register_optimizer_step_pre_hook(refuse).remove


def _gradient_norm(parameters: list[nn.Parameter]) -> Tensor:
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if any(hasattr(gradient, "full_tensor") for gradient in gradients):  # torch takes no mixture
        return total_norm([gradient_norm(gradient) for gradient in gradients])
    whole: Tensor = get_total_norm(gradients) if gradients else torch.tensor(0.0)
    return whole


def _cannot_step(optimizer: Optimizer, weight: Tensor, error: RuntimeError) -> ModelError:
    """Return the error of an optimizer whose states have the type of the weights, as Adam's."""
    types = [str(dtype).removeprefix("torch.") for dtype in (weight.dtype, gradient_type(weight))]
    return ModelError(
        f"{type(optimizer).__name__} could not step weights of {types[0]} whose gradients are "
        f"{types[1]} ({error}): use float32 weights within torch.autocast, or an optimizer that "
        "keeps float32 copies of the weights"
    )


def _distance(parameters: list[nn.Parameter], before: list[Tensor]) -> Tensor:
    """Return the distance of two versions of weights, one at a time: differences need memory."""
    pairs = zip(parameters, before, strict=True)
    norms = [torch.linalg.vector_norm(new.detach() - old) for new, old in pairs]
    distance: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return distance
