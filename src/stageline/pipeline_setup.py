"""From the arguments of `Pipeline` to a session: checked, planned, cut into stages, placed."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh

from stageline.arguments import check_function
from stageline.errors import ModelError
from stageline.model.any_model import AnyModel, is_recorded, layers_of
from stageline.model.inputs import batch_inputs, microbatch_inputs
from stageline.model.layers import LayerSequence
from stageline.model.own_loss import own_loss
from stageline.model.split import cut, layer_costs
from stageline.model.uncut import unmarked
from stageline.options import Options
from stageline.planning.plan_result import Plan, sizes_from_plan
from stageline.report.notebook import text_html
from stageline.report.summary import recomputation
from stageline.runtime.batches.microbatches import first_microbatch, pair
from stageline.runtime.devices import Device, accelerators_of, by_rank
from stageline.runtime.engine.open_session import open_backend, open_session, ranks_of_process
from stageline.runtime.engine.session import Session
from stageline.runtime.engine.sharded_layers import check_not_recorded, check_sharded
from stageline.runtime.exactness.batch_norm import MODES as BATCH_NORM
from stageline.runtime.exactness.gradient_types import accumulation_type
from stageline.runtime.exactness.shared_buffers import check_shared_norms
from stageline.runtime.exactness.unregistered_weights import check_tensors
from stageline.runtime.optimizers.stage_optimizers import OptimizerFunction, SchedulerFunction
from stageline.runtime.placement.checks import (
    BACKENDS,
    check_choice,
    check_optimizers,
    check_untied,
    checked_schedule,
    is_asynchronous,
    recompute_modes,
)
from stageline.runtime.placement.describe import describe, describe_html
from stageline.runtime.placement.layout import Layout
from stageline.runtime.placement.materialise import Init
from stageline.runtime.settings import LossFunction, Settings
from stageline.schedules.schedule import Schedule


def open_pipeline(
    model: AnyModel,
    loss_fn: LossFunction | None,
    *,
    num_ranks: int | None,
    num_microbatches: int | None,
    schedule: str | Schedule,
    plan: Plan | None,
    balance: Sequence[int] | None,
    example_inputs: Any,
    recompute: str | Sequence[str],
    devices: Sequence[Device] | None,
    mesh: DeviceMesh | None,
    backend: str | None,
    optimizer_fn: OptimizerFunction | None,
    scheduler_fn: SchedulerFunction | None,
    init_fn: Init | None,
    options: Options,
    named: Mapping[str, Any],
) -> Session:
    """Open the session of a pipeline; `named` are example inputs by name."""
    if plan is not None:
        given = num_ranks, num_microbatches, balance
        num_ranks, num_microbatches, balance = sizes_from_plan(plan, given)
        schedule, recompute = plan.schedule, plan.recompute_modes
        options = replace(options, offload=options.offload or plan.chosen.offload)
    if backend is None:
        backend = default_backend(mesh)
        _warn_if_alone(backend)
    loss_fn = _checked_loss(model, loss_fn, options)
    _check_choices(backend, options)
    order = checked_schedule(schedule, num_ranks, num_microbatches)
    functions = optimizer_fn, scheduler_fn
    check_optimizers(order, *functions, options.max_norm, backend)
    devices_by_rank = tuple(by_rank(devices, order.num_ranks))
    layers = _layers(model, example_inputs, named, order, options)
    if plan is not None:
        plan.check(tuple(layer.name for layer in layers))
    costs = layer_costs(layers, _shapes(layers, example_inputs, named, order))
    stages = cut(layers, order.num_stages, balance, costs, options.cut_at)
    _check_layers(layers, stages, order)
    modes = recompute_modes(recompute, order.num_stages)
    settings = _settings(loss_fn, modes, functions, options)
    accelerators = accelerators_of(devices_by_rank, simulated=options.check_streams)
    connected = open_backend(backend, order, devices_by_rank, accelerators, mesh, options)
    here = ranks_of_process(connected, order)
    uses_threads = backend == "threads"
    places = devices_by_rank, here, tuple(costs), uses_threads, accelerators
    layout = Layout(layers, order, stages, *places)
    return open_session(layout, settings, connected, options.seed, init_fn)


def _layers(
    model: AnyModel,
    example_inputs: Any,
    named: Mapping[str, Any],
    schedule: Schedule,
    options: Options,
) -> LayerSequence:
    if not is_recorded(model):
        return LayerSequence.of(model)
    if isinstance(model, nn.Module):
        check_not_recorded(model)
    part, others = first_microbatch((example_inputs, named), schedule.num_microbatches)
    return layers_of(model, part, others, options.opaque, schedule.num_stages)


def _settings(
    loss_fn: LossFunction,
    recompute: tuple[str, ...],
    functions: tuple[OptimizerFunction | None, SchedulerFunction | None],
    options: Options,
) -> Settings:
    return Settings(
        loss_fn,
        recompute,
        options.count_fn,
        *functions,
        options.max_norm,
        options.batch_norm,
        options.accumulate,
        options.embedding_rows,
        options.offload,
    )


def _shapes(
    layers: LayerSequence, example_inputs: Any, named: Mapping[str, Any], schedule: Schedule
) -> dict[str, Any] | None:
    """Return what layers read of one micro-batch of the example."""
    if layers.recording is None:
        return None if example_inputs is None else batch_inputs(layers, unmarked(example_inputs))
    part, others = first_microbatch((example_inputs, named), schedule.num_microbatches)
    return microbatch_inputs(layers, batch_inputs(layers, part, others))


def default_backend(mesh: DeviceMesh | None) -> str:
    in_group = mesh is not None or distributed.is_initialized()
    return "processes" if in_group else "threads"


def _warn_if_alone(backend: str) -> None:
    """Warn if a launcher started several processes, and each would train all of the model."""
    num_processes = os.environ.get("WORLD_SIZE", "1")
    if backend != "processes" and "RANK" in os.environ and num_processes != "1":
        warnings.warn(
            f"{num_processes} processes were started, but there is no process group, so each of "
            "them trains the whole model by itself, on threads: call "
            "torch.distributed.init_process_group() before Pipeline, or give it "
            f"backend={backend!r} if that is what you want",
            stacklevel=2,
        )


def _checked_loss(model: AnyModel, loss_fn: LossFunction | None, options: Options) -> LossFunction:
    """Return the loss function; that of a model which computes its own if there is none."""
    if loss_fn is None and is_recorded(model):
        return own_loss
    if loss_fn is None:
        raise ModelError(
            "loss_fn is None, but has to be a function, since layers that are given one by one "
            "have no loss of their own: give loss_fn(output, target)"
        )
    check_function("loss_fn", loss_fn)
    check_function("count_fn", options.count_fn or loss_fn)
    return loss_fn


def _check_choices(backend: str, options: Options) -> None:
    check_choice("batch_norm", options.batch_norm, BATCH_NORM)
    accumulation_type(options.accumulate)
    check_choice("backend", backend, BACKENDS)


def _check_layers(layers: LayerSequence, stages: Sequence[range], schedule: Schedule) -> None:
    """Raise if a schedule cannot train these layers in these stages exactly."""
    check_shared_norms(layers, stages)
    check_sharded(layers, schedule)
    if is_asynchronous(schedule):
        check_untied(schedule, layers, stages)
        check_tensors(layers, f"with {schedule.name!r} its versions have to be kept")


class SessionOpener:
    """Opens the session of a pipeline: at once, or with the first batch if a forward is recorded.

    State: the session, once it is open.
    """

    def __init__(self, model: AnyModel, arguments: Mapping[str, Any]) -> None:
        self.model, self.arguments = model, dict(arguments)
        self.session: Session | None = None
        if self.arguments["example_inputs"] is not None or not is_recorded(model):
            self.session = open_pipeline(model, **self.arguments, named={})

    def opened(self) -> Session:
        """Return the session; raise if it is opened by the first batch, and there was none."""
        if self.session is None:
            raise ModelError(
                f"the layers of a {type(self.model).__name__} are not known before its forward has "
                "run once: give Pipeline example_inputs=, one batch, or make a step first"
            )
        return self.session

    def opened_for(self, inputs: Any, named: Mapping[str, Any]) -> Session:
        """Return the session; if there is none yet, record the model's forward on this batch."""
        if self.session is None:
            arguments = self.arguments | {"example_inputs": inputs}
            self.session = open_pipeline(self.model, **arguments, named=named)
        return self.session

    def opened_for_stream(self, loader: Iterable[Any]) -> tuple[Session, Iterator[Any]]:
        """Return the session, and the loader's batches; the first of them may open it."""
        batches = iter(loader)
        if self.session is not None:
            return self.session, batches
        first = next(batches, None)
        if first is None:
            return self.opened(), batches
        has_own_loss = self.arguments["loss_fn"] is None
        inputs, _ = pair(first, has_own_loss=has_own_loss)
        return self.opened_for(inputs, {}), chain([first], batches)

    @property
    def plain_model(self) -> nn.Module | None:
        """Return the model if there is no session yet, and this process will have all of it."""
        model = self.model
        if self.session is not None or not isinstance(model, nn.Module):
            return None
        backend = self.arguments["backend"] or default_backend(self.arguments["mesh"])
        is_complete = backend != "processes" and not any(p.is_meta for p in model.parameters())
        return model if is_complete else None

    def describe(self) -> str:
        """Return the layers, what passes between stages, and where and why it is cut."""
        if self.session is None:
            return f"{self._name}: its layers are known after the first batch"
        return describe(self.session.assembly.layout, self._name, self._notes(self.session))

    def describe_html(self) -> str:
        """Return a table of the stages, for notebooks."""
        if self.session is None:
            return text_html(self.describe())
        return describe_html(self.session.assembly.layout, self._name, self._notes(self.session))

    @property
    def _name(self) -> str:
        is_module = isinstance(self.model, nn.Module)
        return type(self.model).__name__ if is_module else "a list of layers"

    def _notes(self, session: Session) -> str:
        note = recomputation(session.assembly.settings.recompute)
        return f"{self._reason()}\n{note}" if note else self._reason()

    def _reason(self) -> str:
        if self.arguments["plan"] is not None:
            return "cut as the plan says"
        if self.arguments["balance"] is not None:
            return f"cut by balance={list(self.arguments['balance'])}"
        if places := self.arguments["options"].cut_at:
            return f"cut at {', '.join(places)}, and else where the costliest stage costs the least"
        return "cut where the costliest stage has the fewest FLOPs and parameters"
