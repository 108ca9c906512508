"""Pipeline: the front door. Wrap a model, call `step`, get what a plain loop would give."""

from __future__ import annotations

import warnings
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from itertools import zip_longest
from typing import Any, Protocol, Self

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from stageline.arguments import check_function, check_size
from stageline.errors import BatchError, ModelError, ParityError
from stageline.model.inputs import named_inputs
from stageline.model.layers import INPUT, Layer, LayerSequence, Value
from stageline.model.split import cut
from stageline.planning.plan_result import Plan, sizes_from_plan
from stageline.planning.profiling.profile_result import Profile
from stageline.planning.replan import (
    MeasuredTimes,
    Replan,
    choose_replan,
    measured_times,
    slowest_replica_times,
)
from stageline.report.spans import Unmeasured
from stageline.report.timeline import Timeline
from stageline.runtime import trees
from stageline.runtime.backends.processes.agreement import signature
from stageline.runtime.backends.processes.collectives import Alone, Group, Peers, local
from stageline.runtime.backends.processes.driver import Processes
from stageline.runtime.backends.processes.groups import find_place
from stageline.runtime.backends.threads import Driver, Serial, Threads, run_once
from stageline.runtime.devices import Device, by_rank
from stageline.runtime.engine import autograd as engine
from stageline.runtime.engine import microbatches
from stageline.runtime.engine import recorder as measured
from stageline.runtime.engine.joined_output import connected
from stageline.runtime.engine.loop import Executor, Purpose, Step, Stream, Trace
from stageline.runtime.engine.microbatches import pair
from stageline.runtime.engine.offload import host_memory
from stageline.runtime.engine.result import StepResult
from stageline.runtime.engine.stage import Stage, Target
from stageline.runtime.engine.streaming import finished
from stageline.runtime.exactness.batch_norm import MODES as BATCH_NORM
from stageline.runtime.exactness.caller_context import Ambient
from stageline.runtime.exactness.hidden_weights import (
    SharedBuffers,
    check_shared_norms,
    check_tensors,
)
from stageline.runtime.exactness.layer_state import HostGenerators, are_same, host_generators
from stageline.runtime.exactness.parity import (
    Outcome,
    compare,
    detached,
    left_as_it_was,
    plain_step,
    without_gradients,
)
from stageline.runtime.exactness.tied_weights import TiedWeights
from stageline.runtime.exactness.weight_aliases import Unchanged
from stageline.runtime.optimizers.divergence import Guard
from stageline.runtime.optimizers.late_clipping import (
    LateClipping,
    clip_factor,
    norm_of,
    total_norm,
)
from stageline.runtime.optimizers.stage_optimizers import (
    MakeOptimizer,
    MakeScheduler,
    StageOptimizer,
    Stepper,
)
from stageline.runtime.placement.checks import (
    ACCUMULATE,
    BACKENDS,
    check_choice,
    check_owned,
    check_untied,
    edges_of,
    is_asynchronous,
    recompute_modes,
    schedule_of,
)
from stageline.runtime.placement.materialise import Init, check_filled, materialise
from stageline.runtime.placement.move_layers import (
    Luggage,
    Options,
    check_optimizer,
    check_room,
    exchange,
    moves_of,
    options_of,
    to_devices,
)
from stageline.schedules.placement import ranks_of
from stageline.schedules.program.routine import routine
from stageline.schedules.program.stream import streamed
from stageline.schedules.schedule import Schedule

LossFunction = Callable[[Any, Any], Tensor]


class Closes(Protocol):
    """Something that ends with the pipeline."""

    def close(self) -> None: ...


Results = Generator[StepResult, None, None]  # of a stream, in the order of mini-batches


class Pipeline:
    """A model cut into stages that work on several micro-batches at once.

    `step` adds to `.grad` what a plain loop over the same micro-batches adds, bit for bit; the
    optimizer is yours. `loss_fn(output, target)` returns the mean over its samples; or their sum,
    if `count_fn(target)` says how many of them count.

    A `plan` of `sl.plan` says how many ranks and micro-batches there are, the schedule, the balance
    and what is recomputed. `balance` is the number of layers in each stage; None balances their
    costs, by FLOPs if there is a `sample` of the inputs (only its shapes count), or else by
    parameters. `recompute` and `offload` save memory; `accumulate="fused"` saves time for another
    rounding. `devices` has one for each rank. Weights of a model on the meta device are made here,
    by `init(layer)` or by their modules' own `reset_parameters()`; with several processes each
    makes those of its stages only.

    With `optimizer`, a function of parameters, every stage has one of its own, which steps as soon
    as its gradients are complete, and `run` streams mini-batches; asynchronous schedules need it.
    `scheduler`, a function of an optimizer, steps after each of its steps. `vertical_sync` and
    `replicas` are for 'pipedream'.

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
        num_ranks: int | None = None,
        num_microbatches: int | None = None,
        schedule: str | Schedule = "1f1b",
        plan: Plan | None = None,
        balance: Sequence[int] | None = None,
        sample: Any = None,
        recompute: str | Sequence[str] = "never",
        offload: bool = False,
        accumulate: str = "exact",
        batch_norm: str = "minibatch",
        devices: Sequence[Device] | None = None,
        mesh: DeviceMesh | None = None,
        backend: str | None = None,
        timeout: float = 60.0,
        count_fn: Callable[[Any], float | Tensor] | None = None,
        init: Init | None = None,
        seed: int = 0,
        optimizer: MakeOptimizer | None = None,
        scheduler: MakeScheduler | None = None,
        max_norm: float | None = None,
        vertical_sync: bool | None = None,
        replicas: Sequence[int] | None = None,
    ) -> None:
        layers = LayerSequence.of(model)
        if plan is not None:
            given = num_ranks, num_microbatches, balance
            num_ranks, num_microbatches, balance = sizes_from_plan(
                plan, [layer.name for layer in layers], given
            )
            schedule, recompute = plan.schedule, plan.recompute_modes
            offload = offload or plan.chosen.offload
        check_size("num_ranks", num_ranks)
        check_size("num_microbatches", num_microbatches)
        assert num_ranks is not None  # they are sizes
        assert num_microbatches is not None
        check_choice("batch_norm", batch_norm, BATCH_NORM)
        check_choice("accumulate", accumulate, ACCUMULATE)
        in_group = mesh is not None or distributed.is_initialized()
        backend = backend or ("processes" if in_group else "threads")
        check_choice("backend", backend, BACKENDS)
        check_function("loss_fn", loss_fn)
        check_function("count_fn", count_fn or loss_fn)
        self.layers, self.loss_fn, self.count_fn = layers, loss_fn, count_fn
        self.model = model if isinstance(model, nn.Module) else self.layers.modules
        self.batch_norm, self.accumulate, self.offload = batch_norm, accumulate, offload
        self.seed, self.num_steps = seed, 0
        self.schedule = schedule_of(schedule, num_ranks, num_microbatches, vertical_sync, replicas)
        self.is_asynchronous = is_asynchronous(self.schedule)
        check_owned(self.schedule, optimizer, scheduler, max_norm, backend)
        self.max_norm = max_norm
        self.devices = by_rank(devices, num_ranks)
        shapes = None if sample is None else named_inputs(self.layers, sample)
        self.cut = cut(self.layers, self.schedule.num_stages, balance, shapes)
        check_shared_norms(self.layers, self.cut)
        if self.is_asynchronous:
            check_untied(self.schedule, self.layers, self.cut)
            check_tensors(self.layers, f"with {self.schedule.name!r} its versions have to be kept")
        self.homes = homes_of(self.cut, self.schedule.placement)  # of the layers
        self.driver, self.peers = self._take_part(backend, mesh, timeout)
        self.homes = self._nearest(self.homes)
        places = self._places()
        self.blanks = materialise(self.layers, places, places.__getitem__, seed, init)
        self.tied = self._settle()
        self.peers.share_weights(self.tied, self.homes)
        self.peers.share_with_siblings(self.state_dict().values())
        self.owns_optimizer = optimizer is not None
        self.executor = self._staged(recompute_modes(recompute, self.schedule.num_stages))
        self.stepper = self._owned(optimizer, scheduler) if optimizer else None
        self.is_streaming = self.is_traced = False
        self.stream: Callable[[], Results | None] = lambda: None  # the last one, weakly
        self.has_warned = False  # of generators that all stages share
        self.has_agreed = False  # with other processes, that all are about to do the same
        self.desk: Closes | None = None  # of its checkpoints, once there is one
        self._last: Trace | None = None  # the times of the last step, if a trace is wanted

    def step(self, inputs: Any, target: Any, **named: Any) -> StepResult:
        """One mini-batch forward and backward: gradients are added to those that are there.

        `inputs` is a mapping by the names under which layers read them, or the value of `x`;
        `named` are further inputs. Names that no layer reads are refused.
        """
        if self.is_asynchronous:
            raise ModelError(
                f"step was called, but {self.schedule.name!r} has several mini-batches on their "
                "way at a time: use for result in pipe.run(loader)"
            )
        step = self._training_step(inputs, target, named)
        self._run(step)
        self.num_steps += 1
        self.peers.share_input_gradients(step)
        self._pass_back(step)
        if self.stepper is not None:
            self._step_all(self.stepper, step)
        return StepResult(self.peers.told(step))

    def run(self, loader: Iterable[tuple[Any, Any]]) -> Results:
        """Train on every mini-batch of `loader`, one after another with no barrier between them.

        It gives back their results in order, each `pipe.ahead` mini-batches after it went in: these
        are on their way meanwhile. They are finished when the loader ends or raises, and when the
        loop over the results is left. All ranks call it, and leave it at the same result.

        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> pipe = Pipeline(model, nn.functional.mse_loss, num_ranks=2, num_microbatches=1,
        ...     schedule="pipedream", optimizer=lambda weights: torch.optim.SGD(weights, 0.1))
        >>> data = [(torch.ones(4, 4), torch.zeros(4, 1))] * 8
        >>> losses = [float(result.loss) for result in pipe.run(data)]
        >>> len(losses), losses[-1] < losses[0]
        (8, True)
        """
        if self.stepper is None:
            raise ModelError(
                "run was called, but the optimizer is not the pipeline's: give it one with "
                "optimizer=lambda params: SGD(params, lr=0.1), or use step"
            )
        self._check_idle()
        loader = _noted(self.peers, loader)
        if self.needs_barriers:
            return (self.step(*pair(batch)) for batch in loader)
        stream = self._stream(self.stepper, loader)
        self.stream = weakref.ref(stream)
        return stream

    @property
    def ahead(self) -> int:
        """How many mini-batches after its own a result of `run` is given back."""
        return 0 if self.needs_barriers else self._lag + 1

    @property
    def needs_barriers(self) -> bool:
        """Whether ranks wait for each other at the end of each mini-batch, also in `run`.

        They do if layers share weights, or if gradients are clipped and a step cannot be undone.
        """
        is_clipped = self.max_norm is not None
        clips_early = is_clipped and (self.stepper is None or self.stepper.clipping is None)
        return clips_early or bool(self.tied.by_weight and not self.is_asynchronous)

    @property
    def _lag(self) -> int:
        """How many mini-batches after its own the last thing of a mini-batch is done."""
        is_late = self.stepper is not None and self.stepper.clipping is not None
        return self.executor.period.lag + is_late

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """Those that the pipeline owns, by stage; with several processes, those of this one."""
        own = self.stepper.own.values() if self.stepper else ()
        return tuple(each.optimizer for each in own if each is not None)

    def __call__(self, inputs: Any, **named: Any) -> Any:
        """The output for a batch.

        In training it is part of the caller's graph, for any loss of the caller's own: all forwards
        run now, all backwards when its gradient arrives. In evaluation, or under `torch.no_grad()`,
        it has no graph.

        Outputs of micro-batches are joined in the model's own containers: tensors along dim 0,
        which has to be the samples; what is no tensor has to be equal in all of them. What cannot
        be joined is refused by its place (`runtime/engine/microbatches.py` has the rules).
        """
        is_trained = torch.is_grad_enabled() and any(layer.module.training for layer in self.layers)
        if is_trained and self.is_asynchronous:
            raise ModelError(
                f"the pipeline was called in training, but {self.schedule.name!r} needs its loss: "
                "use pipe.run(loader), or pipe.eval() for outputs"
            )
        given = named_inputs(self.layers, inputs, named)
        pieces = self._pieces(given)
        step = self._start(given, pieces)
        step.purpose = Purpose.FILL if is_trained else Purpose.EVALUATE
        self._run(step)
        self.num_steps += is_trained
        made = [step.outputs[i] for i in range(len(step.inputs))] if step.outputs else None
        have_gradients = [[t.requires_grad for t in trees.tensors(output)] for output in made or ()]
        plain = trees.map_leaves(trees.without_graph, made)
        outputs, have_gradients = self.peers.output((plain, have_gradients))
        if is_trained and any(map(any, have_gradients)):
            return self._connected(step, outputs, have_gradients, pieces)
        return microbatches.join(outputs, pieces)

    def verify(self, inputs: Any, target: Any, **named: Any) -> None:
        """Raise `ParityError` unless a step on this batch has the bits of a plain loop.

        Compared are the losses, all gradients and buffers. The model is left as it was; a second
        copy of its gradients and buffers must fit in memory.
        """
        if self.is_asynchronous:
            raise ModelError(
                f"verify was called, but {self.schedule.name!r} does not give the numbers of a "
                "plain loop, by design: verify a synchronous schedule of the same model"
            )
        self._check_idle()
        given = named_inputs(self.layers, inputs, named)
        inputs, target, named = detached((given, target, {}))
        if any(parameter.is_meta for parameter in self.layers.modules.parameters()):
            raise ModelError(
                "a part of the model is on the meta device, but verify needs the whole of it here: "
                "build it on the CPU, with fewer or smaller layers, and verify before a replan"
            )
        self.peers.share_state(self.layers.modules, self.homes)
        with self.peers.apart():
            found = self._difference(inputs, target, named)
        if difference := self.peers.verdict(found):
            raise ParityError(difference)

    def _difference(self, inputs: Any, target: Any, named: Mapping[str, Any]) -> str | None:
        """Compare a step of the pipeline with a plain loop over the same layers."""
        outside: dict[Tensor, Tensor | None] = {}  # weights of the loss, say, and their gradients
        try:
            with left_as_it_was(self.layers, self.loss_fn):
                expected = self._training_step(*detached((inputs, target, named)))
                is_caught = partial(self._is_caught, expected.number)
                modes = self.batch_norm, self.accumulate
                plain_step(self.layers, expected, *modes, is_caught, outside)
                wanted = Outcome.of(self.layers, expected, outside)
            with left_as_it_was(self.layers, self.loss_fn), without_gradients(outside):
                step = self._training_step(inputs, target, named)
                self._run(step)
                found = Outcome.of(self.layers, step, outside)
        finally:
            for leaf, gradient in outside.items():
                leaf.grad = gradient
        cut = [part if self.peers.has(rank) else range(0) for rank, part in self._placed()]
        return compare(self.layers, found, wanted, cut)

    def _is_caught(self, step: int, layer: int) -> bool:
        """Whether gradients of a layer, or of the loss if it is -1, may wait or be fused."""
        stages = self.executor.stages
        stage = next((stage for stage in stages if layer in stage.numbers), stages[-1])
        return stage.is_caught(layer, step)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Each once, in the order of the layers; with several processes, those of this one."""
        pairs = zip(self.layers, self.homes, strict=True)
        here = nn.ModuleList(layer.module for layer, home in pairs if self.peers.has(home))
        return here.parameters()

    def state_dict(self) -> dict[str, Any]:
        """Parameters and buffers under their names in the model; those of this process."""
        pairs = zip(self.layers, self.homes, strict=True)
        here = LayerSequence(tuple(layer for layer, home in pairs if self.peers.has(home)))
        return here.state_dict()

    @property
    def balance(self) -> tuple[int, ...]:
        """The number of layers in each stage."""
        return tuple(len(part) for part in self.cut)

    def train(self, mode: bool = True) -> Self:
        """Switch all layers to training, or to evaluation.

        A module that contains the layers, but was not itself given to the pipeline, is not known
        here and keeps its own flag; its `train()` and `eval()` switch the layers just as well.
        """
        self.model.train(mode)
        self.layers.train(mode)
        return self

    def eval(self) -> Self:
        """Switch all layers to evaluation."""
        return self.train(mode=False)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients down to a global norm; gives back the norm that they had."""
        everywhere = self._numbers()
        own = {everywhere[p]: norm_of(p.grad) for p in self._counted() if p.grad is not None}
        norms = self.peers.norms(own, len(everywhere))
        total, factor = total_norm(norms), clip_factor(norms, max_norm)
        for parameter in self.parameters():
            if parameter.grad is not None:
                local(parameter.grad).mul_(factor.to(parameter.device))
        return total

    @contextmanager
    def trace(self) -> Iterator[Timeline]:
        """The measured timeline of the last step in the block, in ms; read it after the block."""
        timeline = Timeline(Unmeasured(), self.schedule.placement, balance=self.balance)
        self._last, self.is_traced = None, True
        try:
            yield timeline
        finally:
            self.is_traced = False
        self._measure(timeline, self._last)

    def _measure(self, timeline: Timeline, trace: Trace | None) -> None:
        if trace is None:
            measured.leave_empty(timeline, self.schedule.num_ranks)
        else:
            trace = trace._replace(moments=self.peers.moments(trace.moments))
            measured.fill(timeline, trace, self.schedule, self.executor.period)

    def replan(
        self,
        optimizer: Optimizer | None,
        timelines: Sequence[Timeline],
        profile: Profile | None = None,
    ) -> Replan:
        """Cut the layers into stages anew, if traced steps say that this is worth it.

        Layers that change ranks take their gradients and what the optimizer keeps for them along,
        so training goes on with the same bits. With a `profile`, a rank that takes longer than its
        layers should is taken for a slow device; without one devices count as equal, and so do the
        layers of a stage. Memory is not looked at. All ranks call it, between two steps, with the
        optimizer that they step, or None on a rank without parameters.

        >>> model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))
        >>> pipe = Pipeline(model, nn.functional.mse_loss, num_ranks=2, num_microbatches=4)
        >>> optimizer = torch.optim.AdamW(pipe.parameters())
        >>> with pipe.trace() as timeline:
        ...     result = pipe.step(torch.ones(8, 4), torch.zeros(8, 4))
        >>> pipe.replan(optimizer, [timeline]).old_balance
        (4, 4)
        """
        self._check_idle()
        if self.stepper is not None:
            raise ModelError(
                "replan was called, but the pipeline has an optimizer for each stage, and layers "
                "cannot change theirs: save, build another with the new balance, and load"
            )
        told = self.peers.everywhere(lambda: self._observed(optimizer, timelines, profile))
        times = slowest_replica_times([each for each, _ in told])
        # the first one's, in case that another machine rounds otherwise
        found = self.peers.everywhere(lambda: choose_replan(self.schedule, self.balance, times))[0]
        if found.moves:
            self._move(found.new_balance, optimizer, [options for _, options in told])
        return found

    def close(self) -> None:
        """End the threads, and the process groups; with several processes, of all of them.

        A stream that is on its way is finished first. A pipeline that is garbage collected ends
        its threads as well.
        """
        try:
            if stream := self.stream():
                stream.close()
            if self.desk is not None:
                self.desk.close()
        finally:  # also if a save under way has failed
            if self.stepper is not None:
                self.stepper.release()
            self.driver.close()
            self.peers.close()

    def _mistrust_if_drawn(self, before: Tensor) -> None:
        """A layer that drew nothing when it was watched may begin to; then all are watched."""
        if not torch.equal(torch.get_rng_state(), before):
            for stage in self.executor.stages:
                stage.silent.trusts = False
            warnings.warn(
                "random numbers were drawn from torch's own generator during a step, by a layer "
                "that drew none before, or by another thread of yours: in this step they depend on "
                "timing; from now on all layers are watched, and theirs do not",
                stacklevel=4,
            )

    def _warn_of_host_generators(self, before: HostGenerators) -> None:
        """Python and numpy have one generator each, for all stages."""
        if self.schedule.num_stages > 1 and not are_same(host_generators(), before):
            for stage in self.executor.stages:
                stage.state.draws = None
            if not self.has_warned:
                self.has_warned = True
                warnings.warn(
                    "a layer drew from the generator that Python or numpy have for everybody: if "
                    "several stages do, what they draw depends on the schedule, and with threads "
                    "on timing: draw with torch, or from a generator of the layer's own",
                    stacklevel=4,
                )

    def _agree(self, step: Step) -> None:
        """With other processes, once, that all are about to do the same."""
        if not self.has_agreed:
            self.peers.everywhere(lambda: check_filled(self.layers, self._places(), self.blanks))
            self.blanks = []
            cuts = self.balance, self.executor.recompute
            self.peers.agree(signature(self.schedule, self.layers, *cuts, step))
            self.has_agreed = True

    def _placed(self) -> list[tuple[int, range]]:
        """For each stage its rank and layers."""
        return list(zip(self.schedule.placement, self.cut, strict=True))

    def _places(self) -> dict[int, torch.device | None]:
        """Of the layers of this process."""
        homes = enumerate(self.homes)
        return {number: self.devices[home] for number, home in homes if self.peers.has(home)}

    def _counted(self) -> list[nn.Parameter]:
        """The parameters of this process, but for those that an earlier layer has elsewhere."""
        homes: dict[nn.Parameter, int] = {}
        for layer, home in zip(self.layers, self.homes, strict=True):
            for parameter in layer.module.parameters():
                homes.setdefault(parameter, home)
        return [parameter for parameter in self.parameters() if self.peers.has(homes[parameter])]

    def _take_part(
        self, backend: str, mesh: DeviceMesh | None, timeout: float
    ) -> tuple[Driver, Peers]:
        if backend == "serial":
            return Serial(), Alone()
        if backend == "threads":
            return Threads(self.devices), Alone()
        schedule = self.schedule
        stages = range(schedule.num_stages)
        turns = [ranks_of(schedule.placement, schedule.replicas, stage) for stage in stages]
        place = find_place(mesh, schedule.num_ranks, timeout, turns if schedule.replicas else ())
        sizes = schedule.num_microbatches, schedule.num_stages
        peers = Group(place, schedule.placement[-1], *sizes)
        count = len(self._numbers())
        driver = Processes(place, self.devices[peers.rank], timeout, self._reduce, count)
        peers.guard = driver.guarded
        return driver, peers

    def _reduce(self, stage: int) -> None:
        """Of a weight that others use as well, not all is there yet."""
        tied = {weight for weight, _ in self.tied.by_weight}
        layers = (self.layers.layers[number] for number in self.cut[stage])
        found = dict.fromkeys(p for layer in layers for p in layer.module.parameters())
        self.peers.reduce(p for p in found if p.requires_grad and p not in tied)

    def _settle(self, optimizer: Optimizer | None = None) -> TiedWeights:
        """Layers move to the devices of their ranks."""
        to_devices(self.layers, self._places(), optimizer)
        return TiedWeights.of(self.layers, self._places())

    def _staged(self, recompute: Sequence[str]) -> Executor:
        edges, sent = edges_of(self.layers, self.cut)
        self.shared_buffers = SharedBuffers(self.layers, self.cut)
        stages = []
        for (rank, numbers), values in zip(self._placed(), sent, strict=True):
            device = self.devices[rank]
            memory = host_memory(device) if self.offload and device is not None else None
            shared = self.tied, self.batch_norm, self.accumulate
            stages.append(Stage(self.layers, numbers, values, *shared, device, memory))
        schedule = self.schedule
        if self.owns_optimizer and not schedule.is_stream:
            schedule = streamed(schedule, 1)
        return Executor(routine(schedule, edges), self.layers, stages, recompute)

    def _numbers(self) -> dict[nn.Parameter, int]:
        """Of all parameters, in the order of the layers."""
        return {p: number for number, p in enumerate(self.layers.modules.parameters())}

    def _owned(
        self, make_optimizer: MakeOptimizer, make_scheduler: MakeScheduler | None
    ) -> Stepper:
        """Of each stage that is here, on the weights that no earlier one has."""
        own: dict[int, StageOptimizer | None] = {}
        taken: set[nn.Parameter] = set()
        for number, part in enumerate(self.cut):
            if self.peers.has(self.homes[part[0]]):
                layers = (self.layers.layers[layer] for layer in part)
                found = dict.fromkeys(p for layer in layers for p in layer.module.parameters())
                fresh = [parameter for parameter in found if parameter not in taken]
                taken |= set(fresh)
                own[number] = StageOptimizer.of(fresh, make_optimizer, make_scheduler)
        share = self.peers.finish, self.peers.seen_by_replicas
        stepper = Stepper(self.executor.stages, own, *share, watches=self.is_asynchronous)
        if self.max_norm is not None and self._can_clip_late(stepper):
            stepper.clipping = LateClipping(own, self._numbers(), self.max_norm, stepper.stepping)
        return stepper

    def _can_clip_late(self, stepper: Stepper) -> bool:
        """Whether steps can be undone, and forwards repeated; all ranks do the same."""
        has_norms = any(stage.statistics.modules for stage in self.executor.stages)
        is_kept = not (has_norms and self.batch_norm == "microbatch")
        return all(self.peers.everywhere(lambda: is_kept and stepper.is_undoable))

    def _step_all(self, stepper: Stepper, step: Step) -> None:
        """After a mini-batch whose gradients are all there."""
        total = self.clip_grad_norm_(self.max_norm) if self.max_norm is not None else None
        if total is None or torch.isfinite(total):
            for number in stepper.own:
                step.updates[number] = stepper.step_now(number)
        else:
            for number in stepper.own:
                step.updates[number] = stepper.skip(number, float(total))

    def _stream(self, stepper: Stepper, loader: Iterable[tuple[Any, Any]]) -> Results:
        guard, unseen = Guard(), deque[tuple[int, StepResult]]()
        with self._streaming(stepper) as stream:
            running = self.driver.start(self.executor, stream)
            steps = self._fed(loader)
            with closing(finished(running, stream, steps, self.ahead, stepper.check)) as done:
                for step in done:
                    result = StepResult(self.peers.told(step))
                    if self.is_asynchronous:
                        unseen.append((step.number, result))
                    # so late that no rank has to wait for another to tell it
                    if len(unseen) > self.ahead + 1:
                        _warn(guard, *unseen.popleft())
                    yield result
                for number, result in unseen:
                    _warn(guard, number, result)

    def _fed(self, loader: Iterable[tuple[Any, Any]]) -> Iterator[Step]:
        for batch in loader:
            inputs, target = pair(batch)
            step = self._training_step(inputs, target, {})
            if any(t.requires_grad for part in step.inputs for t in trees.tensors(part)):
                raise BatchError(
                    "inputs require gradients, but a stream passes none back to what made them: "
                    "detach() them, or make that a layer"
                )
            self._agree(step)
            self.num_steps += 1
            yield step

    @contextmanager
    def _streaming(self, stepper: Stepper) -> Iterator[Stream]:
        """Stages keep versions of their weights meanwhile, where they need them."""
        self._check_idle()
        if any(parameter.grad is not None for parameter in self.parameters()):
            raise ModelError(
                "some parameters have gradients, but a stream begins without any: call "
                "model.zero_grad() before run"
            )
        stream = Stream(stepper=stepper, is_traced=self.is_traced, lag=self._lag)
        stages = [
            stage for number, stage in enumerate(self.executor.stages) if number in stepper.own
        ]
        trusted = [stage.silent.trusts for stage in stages]
        self.peers.begin(())
        stepper.begin()
        self.is_streaming = True
        try:
            for stage in stages:
                stage.keep_versions(self.executor.depth_of(stage))
                # with threads, the caller may draw from torch's generator at any time
                stage.silent.trusts &= not isinstance(self.driver, Threads)
            with self._shared_buffers_unchanged():
                yield stream
        except BaseException:
            self._watch_again()
            raise
        finally:
            self.is_streaming = False
            stepper.end()
            for stage, trusts in zip(stages, trusted, strict=True):
                stage.versions = None
                stage.silent.trusts = trusts
                stage.statistics.seen.clear()
            for parameter in self.parameters():
                parameter.grad = None
            self._last = Trace(
                stream.moments, Purpose.TRAIN, self.schedule.num_microbatches, stream.length
            )

    def _check_idle(self) -> None:
        if self.is_streaming:
            raise ModelError(
                "a stream of run is on its way, but only one thing can be done at a time: use up "
                "its results, or close() it"
            )

    def _nearest(self, homes: list[int]) -> list[int]:
        """Of a layer that several ranks hold, the rank that is here, if it is one of them."""
        nearest = list(homes)
        for stage, part in enumerate(self.cut):
            for rank in ranks_of(self.schedule.placement, self.schedule.replicas, stage):
                if self.schedule.replicas and self.peers.has(rank):
                    for number in part:
                        nearest[number] = rank
        return nearest

    def _observed(
        self,
        optimizer: Optimizer | None,
        timelines: Sequence[Timeline],
        profile: Profile | None,
    ) -> tuple[MeasuredTimes, Options | None]:
        """What this process knows before a replan: times, and what its optimizer's groups are."""
        names = tuple(layer.name for layer in self.layers)
        times = measured_times(self.schedule, self.balance, names, timelines, profile)
        check_optimizer(optimizer, self.layers, self.parameters())
        return times, options_of(optimizer)

    def _move(
        self,
        balance: Sequence[int],
        optimizer: Optimizer | None,
        everywhere: Sequence[Options | None],
    ) -> None:
        """Nothing changes unless all processes can do their part."""
        parts = cut(self.layers, self.schedule.num_stages, balance)
        check_shared_norms(self.layers, parts)
        homes = homes_of(parts, self.schedule.placement)
        moves = moves_of(self.layers, self.homes, homes, self.peers)
        self.peers.everywhere(lambda: check_room(moves, optimizer, everywhere, self.peers))
        self.cut, self.homes = parts, homes
        if moves:
            luggage = Luggage(optimizer)
            exchange(moves, luggage, self.peers)
            luggage.put_back(self.parameters())
        self.tied = self._settle(optimizer)
        trusts = all(stage.silent.trusts for stage in self.executor.stages)
        self.executor = self._staged(self.executor.recompute)
        for stage in self.executor.stages:
            stage.silent.trusts &= trusts

    def _training_step(self, inputs: Any, target: Any, named: Mapping[str, Any]) -> Step:
        if torch.is_inference_mode_enabled():
            raise ModelError(
                "a step was asked for in torch.inference_mode(), where nothing has a gradient: "
                "leave it first, or call the pipeline for outputs"
            )
        given = named_inputs(self.layers, inputs, named)
        pieces = self._pieces(given, target)
        targets = microbatches.cut(target, pieces)
        weights = self._weights(pieces, targets)
        step = self._start(given, pieces)
        parts = zip(targets, weights, strict=True)
        step.targets = [Target(self.loss_fn, part, weight) for part, weight in parts]
        return step

    def _start(self, given: dict[str, Any], pieces: list[int]) -> Step:
        with torch.enable_grad():  # inputs may come from a graph of the caller's
            parts = microbatches.cut(given, pieces)
        first = self.peers.replica * self.schedule.num_microbatches
        return Step(parts, self.seed, self.num_steps, first, Ambient.here())

    def _run(self, step: Step) -> None:
        self._check_idle()
        statistics = [stage.statistics for stage in self.executor.stages]
        self._agree(step)
        has_backward = step.purpose in (Purpose.TRAIN, Purpose.DRAIN)
        self.tied.refresh()
        if has_backward:
            self.peers.begin(self.parameters())
        before, of_host = torch.get_rng_state(), host_generators()
        unchanged = Unchanged(self.parameters() if has_backward and len(step.inputs) > 1 else ())
        for stage in self.executor.stages:
            stage.unchanged = unchanged
        try:
            with self._shared_buffers_unchanged():
                moments = run_once(self.driver, self.executor, step).moments
            self._mistrust_if_drawn(before)
            self._warn_of_host_generators(of_host)
            if has_backward:
                self.peers.share_tied(self.tied, self.homes)
                self.tied.add_gradients()
                unchanged.check()
                here = set(self.parameters())
                self.peers.reduce(weight for weight, _ in self.tied.by_weight if weight in here)
                self.peers.finish()
            for each in statistics:
                each.update(step.number, self.peers.seen_by_replicas)
        except BaseException:
            self._watch_again()
            raise
        finally:
            for stage in self.executor.stages:
                stage.unchanged = None
            for each in statistics:
                each.seen.clear()
        self._last = Trace(moments, step.purpose, len(step.inputs))

    def _watch_again(self) -> None:
        """After a step that failed: it may have failed for what a layer began to do."""
        for stage in self.executor.stages:
            stage.inner.first_step = None

    @contextmanager
    def _shared_buffers_unchanged(self) -> Iterator[None]:
        """Around the first run: what several stages have must not be moved by any of them."""
        shared = self.shared_buffers
        if not shared.places:
            yield
            return
        shared.note()
        yield
        self.peers.everywhere(shared.compare)

    def _pass_back(self, step: Step) -> None:
        """On to what made the inputs, if they are part of a graph."""
        wanted = [(t, g) for t, g in _wanted(step) if g is not None]
        if wanted:
            roots = [engine.root(tensor, gradient) for tensor, gradient in wanted]
            engine.backward(roots, [gradient for _, gradient in wanted])

    def _connected(
        self, step: Step, outputs: list[Any], have_gradients: list[list[bool]], pieces: list[int]
    ) -> Any:
        """The joined outputs as part of the caller's graph."""
        joined = microbatches.join(outputs, pieces)
        splits = [
            microbatches.splitter(column, pieces)
            for column in zip(*map(trees.tensors, outputs), strict=True)
        ]
        stages = self.executor.stages

        def drain(gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
            if step.purpose is Purpose.DRAIN:
                raise ModelError("backward ran twice through one output, but its graph is gone")
            if self.executor.stages is not stages:
                raise ModelError(
                    "layers moved between a forward and its backward, and the graph is gone: call "
                    "replan after backward()"
                )
            step.purpose = Purpose.DRAIN
            columns = [
                [None] * len(pieces) if gradient is None else split(gradient)
                for gradient, split in zip(gradients, splits, strict=True)
            ]
            step.output_gradients = [
                {self.layers.output: list(row)} for row in zip(*columns, strict=True)
            ]
            self._run(step)
            self.peers.share_input_gradients(step)
            return [gradient for _, gradient in _wanted(step)]

        inputs = [t for part in step.inputs for t in trees.tensors(part) if t.requires_grad]
        weights = [p for p in self.parameters() if p.requires_grad and not p.is_meta]
        have_one = [any(column) for column in zip(*have_gradients, strict=True)]
        fresh = iter(connected(trees.tensors(joined), have_one, inputs, weights, drain))
        return trees.map_leaves(
            lambda leaf: next(fresh) if isinstance(leaf, Tensor) else leaf, joined
        )

    def _pieces(self, *batches: Any) -> list[int]:
        length = microbatches.num_samples(*batches)
        return microbatches.sizes(length, self.schedule.num_microbatches)

    def _weights(self, pieces: list[int], targets: list[Any]) -> list[float]:
        """What each micro-batch's loss counts for: its share of samples, or 1 / all that count."""
        if self.count_fn is None:
            samples = self.peers.total(sum(pieces))
            return [size / samples for size in pieces]
        total = self.peers.total(sum(float(self.count_fn(part)) for part in targets))
        return [1.0 / total if total else 0.0] * len(pieces)


def homes_of(parts: Sequence[range], placement: Sequence[int]) -> list[int]:
    """Of the layers, in their order."""
    return [rank for rank, part in zip(placement, parts, strict=True) for _ in part]


def _wanted(step: Step) -> list[tuple[Tensor, Tensor | None]]:
    """The tensors of the micro-batches that have a graph of their own, and their gradients."""
    return [
        (tensor, gradient)
        for microbatch, part in enumerate(step.inputs)
        for name, tree in part.items()
        for tensor, gradient in zip_longest(
            trees.tensors(tree), step.input_gradients.get((microbatch, Value(INPUT, name)), ())
        )
        if tensor.requires_grad
    ]


def _noted(peers: Peers, loader: Iterable[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
    """What a loader gives; other ranks are told if it raises."""
    with peers.noted():
        yield from loader


def _warn(guard: Guard, number: int, result: StepResult) -> None:
    """Where the results of a stream are used."""
    if warning := guard.look(number, result.told):
        warnings.warn(warning, RuntimeWarning, stacklevel=3)
