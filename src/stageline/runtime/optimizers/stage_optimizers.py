"""Optimizers that the pipeline owns: one for each stage, which steps when its gradients are there.

A stage whose gradients are not finite leaves its step out, and says so. Nobody else may step these
optimizers or change their options while mini-batches are on their way: stages are at different
steps then.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from stageline.errors import ModelError
from stageline.runtime.exactness.weight_aliases import UnchangedWeights
from stageline.runtime.optimizers.undo import check_undoable
from stageline.torch_private import mark_as_stepped

if TYPE_CHECKING:
    from stageline.runtime.engine.loop import Step
    from stageline.runtime.exactness.batch_norm import NormMoments
    from stageline.runtime.optimizers.late_clipping import LateClipping
    from stageline.runtime.optimizers.weight_versions import Versions
    from stageline.runtime.stage.stage import Stage

MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]
MakeScheduler = Callable[[Optimizer], LRScheduler]
Options = list[dict[str, Any]]  # by parameter group
# what schedulers and people change; in others some optimizers keep counts of their own
WATCHED = ("lr", "momentum", "betas", "weight_decay")


class Update(NamedTuple):
    """What a step did to a stage."""

    is_skipped: bool
    norm: float  # of the change of its weights, or of their gradients if it was not watched
    is_redone: bool = False  # it was made as if nothing had to be clipped, and made again


@dataclass
class StageOptimizer:
    """Of one stage. State: the options that its groups have as far as we know."""

    optimizer: Optimizer
    scheduler: LRScheduler | None
    known: Options

    @staticmethod
    def of(
        parameters: Iterable[nn.Parameter],
        make_optimizer: MakeOptimizer,
        make_scheduler: MakeScheduler | None,
    ) -> StageOptimizer | None:
        """None for a stage that has nothing to train."""
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        if not trained:
            return None
        optimizer = make_optimizer(trained)
        if not isinstance(optimizer, Optimizer):
            raise ModelError(
                f"optimizer gave {optimizer!r} for the parameters of a stage, but has to be a "
                "function that makes an optimizer: optimizer=lambda params: SGD(params, lr=0.1)"
            )
        scheduler = make_scheduler(optimizer) if make_scheduler else None
        return StageOptimizer(optimizer, scheduler, options_of(optimizer))

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def meddling(self) -> str | None:
        """What someone else did to the options, in words."""
        for old, new in zip(self.known, options_of(self.optimizer), strict=False):
            for name, value in old.items():
                if new.get(name) != value:
                    return f"{name} went from {value} to {new.get(name)}"
        return None

    def restore(self) -> None:
        """Whatever somebody else did to them."""
        for group, options in zip(self.optimizer.param_groups, self.known, strict=False):
            group.update(options)

    def after_step(self) -> None:
        self.optimizer.zero_grad()
        if self.scheduler is not None:
            mark_as_stepped(self.optimizer)
            self.restore()
            self.known = []  # the caller may look from another thread, while they change
            self.scheduler.step()
            self.known = options_of(self.optimizer)


def options_of(optimizer: Optimizer) -> Options:
    return [
        {name: group[name] for name in WATCHED if isinstance(group.get(name), int | float | tuple)}
        for group in optimizer.param_groups
    ]


class Stepper:
    """State: the optimizers, and what others were seen to do to them."""

    def __init__(
        self,
        stages: list[Stage],
        own: Mapping[int, StageOptimizer | None],
        finish: Callable[[], None],
        seen_by_replicas: Callable[[NormMoments], NormMoments],
        *,
        watches: bool,
    ) -> None:
        self.stages, self.own = stages, own
        self.finish, self.seen_by_replicas = finish, seen_by_replicas
        self.watches = watches  # how much weights change
        self.meddled: str | None = None
        self.clipping: LateClipping | None = None  # if the norm of all gradients has a limit
        self.at_work: set[Optimizer] = set()
        self.unchanged: dict[int, UnchangedWeights] = {}  # by stage, in a stream
        self.release = weakref.finalize(self, self._refuse_others())

    def step(self, number: int, depth: int, step: Step) -> Update:
        """In a stream: all gradients of a mini-batch are there, on this stage."""
        self.begin_late((number,), step)
        if number in self.unchanged:
            self.unchanged[number].check()
        update = self._step(self.own[number], self.stages[number].versions, depth)
        self._keep_watch(number)
        return update

    @property
    def schedulers(self) -> list[LRScheduler]:
        return [own.scheduler for own in self.own.values() if own and own.scheduler]

    @property
    def is_undoable(self) -> bool:
        """Whether a step of every optimizer here can be taken back."""
        try:
            for own in self.own.values():
                if own is not None:
                    check_undoable(own.optimizer)
        except ModelError:
            return False
        return True

    def begin_late(self, numbers: Iterable[int], step: Step) -> None:
        """Gradients are those of all replicas now, and so are statistics; options are ours."""
        self.finish()
        for number in numbers:
            stage, own = self.stages[number], self.own[number]
            stage.running_layer = "optimizer"
            stage.statistics.update(step.number, self.seen_by_replicas)
            if own is not None:
                self._look_for_meddling(number, own)
                own.restore()

    def step_now(self, number: int) -> Update:
        """Between two mini-batches, when options may have changed."""
        own = self.own[number]
        if own is not None:
            own.known = options_of(own.optimizer)
        return self._step(own, None, 0)

    def skip(self, number: int, norm: float) -> Update:
        """Between two mini-batches: gradients are not finite, on this stage or elsewhere."""
        own = self.own[number]
        if own is not None:
            own.after_step()
        return Update(is_skipped=True, norm=norm)

    def check(self) -> None:
        """Raise if somebody else changed an optimizer since the stream began."""
        for number, own in self.own.items():
            if own is not None:
                self._look_for_meddling(number, own)
        if self.meddled is not None:
            raise ModelError(
                f"{self.meddled}, in the middle of a stream in which every stage is at another "
                "step: give Pipeline a scheduler=, which steps with each stage, or change it "
                "between two streams"
            )

    def begin(self) -> None:
        """A stream: from now on options are ours alone."""
        self.meddled = None
        for number, own in self.own.items():
            if own is not None:
                own.known = options_of(own.optimizer)
                self._keep_watch(number)

    def _keep_watch(self, number: int) -> None:
        """On weights that hooks of the user's could change before the next step."""
        if own := self.own[number]:
            self.unchanged[number] = UnchangedWeights(own.parameters)

    def _look_for_meddling(self, number: int, own: StageOptimizer) -> None:
        found = own.meddling()
        if found and self.meddled is None:
            self.meddled = f"{found} on stage {number}"

    def end(self) -> None:
        """Of a stream: options that somebody else changed, and was told so, are what they were."""
        for own in self.own.values():
            if own is not None and self.meddled is not None:
                own.restore()

    def _step(self, own: StageOptimizer | None, versions: Versions | None, depth: int) -> Update:
        if own is None:
            return Update(is_skipped=False, norm=0.0)
        parameters = own.parameters
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norm = float(get_total_norm(gradients)) if gradients else 0.0
        is_finite = math.isfinite(norm)
        if is_finite:
            before = [p.data if depth else p.data.clone() for p in parameters if self.watches]
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
        return Update(not is_finite, norm)

    @contextmanager
    def stepping(self, optimizer: Optimizer) -> Iterator[None]:
        self.at_work.add(optimizer)
        try:
            yield
        finally:
            self.at_work.discard(optimizer)

    def _refuse_others(self) -> Callable[[], None]:
        """A hook before all steps of all optimizers, those of others too; gives what removes it."""
        owned = {parameter for own in self.own.values() if own for parameter in own.parameters}
        at_work = self.at_work

        def refuse(optimizer: Optimizer, *_: Any) -> None:
            if optimizer not in at_work and any(
                parameter in owned
                for group in optimizer.param_groups
                for parameter in group["params"]
            ):
                raise ModelError(
                    f"{type(optimizer).__name__}.step() was called for weights that the pipeline "
                    "steps itself, when their gradients are complete: leave it out"
                )

        return register_optimizer_step_pre_hook(refuse).remove


def _distance(parameters: list[nn.Parameter], before: list[Tensor]) -> float:
    """Between two versions of weights, one at a time: their difference needs memory too."""
    pairs = zip(parameters, before, strict=True)
    norms = [torch.linalg.vector_norm(new.detach() - old) for new, old in pairs]
    return float(torch.linalg.vector_norm(torch.stack(norms)))
