"""From the arguments of `Pipeline` to a session: checked, planned, cut into stages, placed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import distributed
from torch.distributed.device_mesh import DeviceMesh

from stageline.arguments import check_function
from stageline.model.inputs import named_inputs
from stageline.model.layers import LayerSequence
from stageline.model.split import cut
from stageline.options import Options
from stageline.planning.plan_result import Plan, sizes_from_plan
from stageline.runtime.devices import Device, by_rank
from stageline.runtime.engine.open_session import open_backend, open_session
from stageline.runtime.engine.session import Session
from stageline.runtime.exactness.batch_norm import MODES as BATCH_NORM
from stageline.runtime.exactness.shared_buffers import check_shared_norms
from stageline.runtime.exactness.unregistered_weights import check_tensors
from stageline.runtime.optimizers.stage_optimizers import OptimizerFunction, SchedulerFunction
from stageline.runtime.placement.checks import (
    ACCUMULATE,
    BACKENDS,
    check_choice,
    check_optimizers,
    check_untied,
    checked_schedule,
    is_asynchronous,
    recompute_modes,
)
from stageline.runtime.placement.materialise import Init
from stageline.runtime.settings import LossFunction, Settings
from stageline.schedules.schedule import Schedule


def open_pipeline(
    layers: LayerSequence,
    loss_fn: LossFunction,
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
) -> Session:
    """Open the session of a pipeline."""
    if plan is not None:
        given = num_ranks, num_microbatches, balance
        names = [layer.name for layer in layers]
        num_ranks, num_microbatches, balance = sizes_from_plan(plan, names, given)
        schedule, recompute = plan.schedule, plan.recompute_modes
        options = replace(options, offload=options.offload or plan.chosen.offload)
    backend = backend or _default_backend(mesh)
    _check_choices(loss_fn, backend, options)
    order = checked_schedule(schedule, num_ranks, num_microbatches)
    functions = optimizer_fn, scheduler_fn
    check_optimizers(order, *functions, options.max_norm, backend)
    devices_by_rank = tuple(by_rank(devices, order.num_ranks))
    shapes = None if example_inputs is None else named_inputs(layers, example_inputs)
    stages = cut(layers, order.num_stages, balance, shapes)
    _check_layers(layers, stages, order)
    settings = Settings(
        loss_fn,
        recompute_modes(recompute, order.num_stages),
        options.count_fn,
        *functions,
        options.max_norm,
        options.batch_norm,
        options.accumulate,
        options.offload,
    )
    connected = open_backend(backend, order, devices_by_rank, mesh, options.timeout)
    places = stages, order, devices_by_rank
    return open_session(layers, *places, settings, connected, options.seed, init_fn)


def _default_backend(mesh: DeviceMesh | None) -> str:
    in_group = mesh is not None or distributed.is_initialized()
    return "processes" if in_group else "threads"


def _check_choices(loss_fn: object, backend: str, options: Options) -> None:
    check_choice("batch_norm", options.batch_norm, BATCH_NORM)
    check_choice("accumulate", options.accumulate, ACCUMULATE)
    check_choice("backend", backend, BACKENDS)
    check_function("loss_fn", loss_fn)
    check_function("count_fn", options.count_fn or loss_fn)


def _check_layers(layers: LayerSequence, stages: Sequence[range], schedule: Schedule) -> None:
    """Raise if a schedule cannot train these layers in these stages exactly."""
    check_shared_norms(layers, stages)
    if is_asynchronous(schedule):
        check_untied(schedule, layers, stages)
        check_tensors(layers, f"with {schedule.name!r} its versions have to be kept")
