"""Pipeline: the public class. Wrap a model, call `step`, get what a plain loop would give."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Self

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from stageline.deprecated import accepts_deprecated
from stageline.model.any_model import AnyModel
from stageline.model.layers import LayerSequence
from stageline.options import Options
from stageline.pipeline_setup import SessionOpener
from stageline.planning.plan_result import Plan
from stageline.planning.profiling.profile_result import Profile
from stageline.planning.replan import Replan
from stageline.planning.replan_session import replan_session
from stageline.report.timeline import Timeline
from stageline.runtime.batches.call import call
from stageline.runtime.batches.loss_scaling import unscale
from stageline.runtime.batches.result import StepResult
from stageline.runtime.batches.stream_results import StepResults, run
from stageline.runtime.batches.train_step import train_step
from stageline.runtime.devices import Device
from stageline.runtime.engine.recorder import Recorder
from stageline.runtime.engine.session import Session
from stageline.runtime.optimizers.clipping import clip_grad_norm
from stageline.runtime.optimizers.stage_optimizers import OptimizerFunction, SchedulerFunction
from stageline.runtime.parity.verify import verify
from stageline.runtime.placement.materialise import Init
from stageline.runtime.settings import LossFunction
from stageline.schedules.schedule import Schedule

DEFAULT = Options()


class Pipeline:
    """A model cut into stages that work on several micro-batches at once.

    `step` adds to `.grad` what a plain loop over the same micro-batches adds, bit for bit; the
    optimizer is yours. The model is any module: the forward of one that is no `nn.Sequential` is
    recorded, on `example_inputs` or on the first batch. `loss_fn(output, target)` returns the mean
    over its samples; without it the loss is the model's own, in its output.

    A `plan` of `sl.plan` sets the number of ranks and micro-batches, the schedule, the balance and
    what is recomputed. `balance` is the number of layers in each stage; None balances their costs,
    by FLOPs if there are `example_inputs`, or else by parameters. `recompute` saves memory:
    "never", "always", "except_last", "selective" (which keeps results of costly operators), or one
    of them for each stage. `devices` has one for each rank. `backend` is "threads", "serial" or
    "processes"; None is "processes" under torchrun.
    Weights of a model on the meta device are made here, by `init_fn(layer)` or their modules'
    `reset_parameters()`; each process makes those of its stages only. `options` is `sl.Options`.

    With `optimizer_fn`, a function of parameters, every stage has an optimizer of its own, which
    steps as soon as its gradients are complete, and `run` streams mini-batches; asynchronous
    schedules need it. `scheduler_fn`, a function of an optimizer, makes a learning-rate scheduler.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    >>> import torch
    >>> with Pipeline(model, nn.functional.mse_loss, num_ranks=2, num_microbatches=4) as pipe:
    ...     result = pipe.step(torch.ones(8, 4), torch.zeros(8, 1))
    >>> tuple(model[0].weight.grad.shape)
    (8, 4)
    """

    @accepts_deprecated
    def __init__(
        self,
        model: AnyModel,
        loss_fn: LossFunction | None = None,
        *,
        num_ranks: int | None = None,
        num_microbatches: int | None = None,
        schedule: str | Schedule = "1f1b",
        plan: Plan | None = None,
        balance: Sequence[int] | None = None,
        example_inputs: Any = None,
        recompute: str | Sequence[str] = "never",
        devices: Sequence[Device] | None = None,
        mesh: DeviceMesh | None = None,
        backend: str | None = None,
        optimizer_fn: OptimizerFunction | None = None,
        scheduler_fn: SchedulerFunction | None = None,
        init_fn: Init | None = None,
        options: Options = DEFAULT,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "model")}
        self._opener = SessionOpener(model, given)
        self.model = model if isinstance(model, nn.Module) else self.layers.modules
        self._stream: Callable[[], StepResults | None] = lambda: None  # the last one

    def step(
        self, inputs: Any = None, target: Any = None, *, scaler: Any = None, **named: Any
    ) -> StepResult:
        """Run one mini-batch forward and backward, and add to the gradients that are there.

        `inputs` are those of the model's forward: a mapping by name, a tuple in order, or its first
        argument. Layers that were given one by one read them by name. `named` are further inputs.
        A `scaler`, a `torch.amp.GradScaler`, scales gradients, but not the loss that is returned:
        call `unscale_` before the optimizer's step.
        """
        session = self._opener.opened_for(inputs, named)
        return train_step(session, inputs, target, named, scaler)

    def run(self, loader: Iterable[tuple[Any, Any]]) -> StepResults:
        """Train on every mini-batch of `loader`, one after another with no barrier between them.

        It yields their results in order, each `pipe.ahead` mini-batches after it went in. What is
        on its way is finished when the loader ends or raises, and when the loop over the results is
        left. All ranks call it, and leave it at the same result.

        >>> import torch
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> pipe = Pipeline(model, nn.functional.mse_loss, num_ranks=2, num_microbatches=1,
        ...     schedule="pipedream", optimizer_fn=lambda params: torch.optim.SGD(params, 0.1))
        >>> data = [(torch.ones(4, 4), torch.zeros(4, 1))] * 8
        >>> losses = [float(result.loss) for result in pipe.run(data)]
        >>> len(losses), losses[-1] < losses[0]
        (8, True)
        """
        results = run(*self._opener.opened_for_stream(loader))
        self._stream = weakref.ref(results)
        return results

    @property
    def ahead(self) -> int:
        """Return how many mini-batches after its own a result of `run` is given back."""
        return self._session.ahead

    def __call__(self, inputs: Any, **named: Any) -> Any:
        """Return the output for a batch.

        In training it is part of the caller's graph, for any loss of the caller's own: all forwards
        run now, all backwards when its gradient arrives. In evaluation, or under `torch.no_grad()`,
        it has no graph.

        Outputs of micro-batches are joined in the model's own containers: tensors along dim 0,
        which has to be the samples; what is no tensor has to be equal in all of them.
        """
        return call(self._opener.opened_for(inputs, named), inputs, named)

    def verify(self, inputs: Any = None, target: Any = None, **named: Any) -> None:
        """Raise `ParityError` unless a step on this batch has the bits of a plain loop.

        Losses, gradients and buffers are compared. The model is left as it was.
        """
        verify(self._opener.opened_for(inputs, named), inputs, target, named)

    @property
    def _session(self) -> Session:
        return self._opener.opened()

    @property
    def layers(self) -> LayerSequence:
        return self._session.assembly.layout.layers

    @property
    def schedule(self) -> Schedule:
        return self._session.assembly.layout.schedule

    @property
    def balance(self) -> tuple[int, ...]:
        """Return the number of layers in each stage."""
        return self._session.assembly.layout.balance

    @property
    def num_steps(self) -> int:
        """Return how many steps were made; random numbers depend on it."""
        return self._session.num_steps

    @property
    def seed(self) -> int:
        """Return what random numbers depend on, beside the number of steps."""
        return self._session.seed

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """Return the optimizers that the pipeline owns, by stage; those of this process."""
        optimizers = self._session.optimizers
        return optimizers.optimizers if optimizers is not None else ()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield each parameter of this process once, in the order of the layers."""
        return (self._opener.plain_model or self._session.assembly.layout).parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of this process under their names in the model."""
        return (self._opener.plain_model or self._session.assembly.layout).named_parameters()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of this process's parameters."""
        for parameter in self.parameters():
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.detach_().zero_()

    def state_dict(self) -> dict[str, Any]:
        """Return parameters and buffers of this process under their names in the model."""
        return self._session.assembly.layout.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Copy parameters and buffers from a `state_dict` of the whole model, or of this process.

        `strict` refuses names that the model does not have, and names that are missing.
        """
        self._session.check_idle()
        self._session.assembly.layout.load_state_dict(state_dict, strict=strict)

    def train(self, mode: bool = True) -> Self:
        """Switch all layers to training, or to evaluation.

        A module around the layers that was not itself given to the pipeline keeps its own flag.
        """
        self.model.train(mode)
        if self._opener.session is not None:
            self.layers.train(mode)
        return self

    def eval(self) -> Self:
        """Switch all layers to evaluation."""
        return self.train(mode=False)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients down to a global norm; return the norm that they had."""
        assembly = self._session.assembly
        return clip_grad_norm(assembly.layout, assembly.collectives, max_norm)

    def unscale_(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        """Divide the gradients of `step(…, scaler=scaler)` by the scale; all ranks call it.

        If a gradient of any rank is not finite, `scaler.step(optimizer)` skips on all ranks.
        """
        unscale(self._session, scaler, optimizer)

    def trace(self) -> AbstractContextManager[Recorder]:
        """Record the last step of a `with` block; the recorder's `timeline` exists after it."""
        return self._session.recording()

    def replan(
        self,
        optimizer: Optimizer | None,
        timelines: Sequence[Timeline],
        profile: Profile | None = None,
    ) -> Replan:
        """Cut the layers into stages anew, if traced steps say that this is worth it.

        Layers that change ranks take their gradients and what the optimizer keeps for them along,
        so training goes on with the same bits. With a `profile`, a rank that takes longer than its
        layers should is taken for a slow device; without one all devices count as equal. Memory is
        not checked. All ranks call it between steps, with the optimizer that they step, or None.

        >>> import torch
        >>> model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))
        >>> pipe = Pipeline(model, nn.functional.mse_loss, num_ranks=2, num_microbatches=4)
        >>> optimizer = torch.optim.AdamW(pipe.parameters())
        >>> with pipe.trace() as trace:
        ...     result = pipe.step(torch.ones(8, 4), torch.zeros(8, 4))
        >>> pipe.replan(optimizer, [trace.timeline]).old_balance
        (4, 4)
        """
        return replan_session(self._session, optimizer, timelines, profile)

    def close(self) -> None:
        """Finish a stream, and end the threads and the process groups; all processes call it."""
        try:
            if stream := self._stream():
                stream.close()
        finally:
            if session := self._opener.session:
                session.close()

    def __repr__(self) -> str:
        return self._opener.describe()

    def _repr_html_(self) -> str:
        return self._opener.describe_html()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def session_of(pipe: Pipeline) -> Session:
    """Return what a pipeline runs on, for the packages that save, load and train it."""
    return pipe._session  # noqa: SLF001  private to users


def arguments_of(pipe: Pipeline) -> Mapping[str, Any]:
    """Return the arguments that a pipeline was made with, for the records of its training."""
    return pipe._opener.arguments  # noqa: SLF001  private to users
