"""Connect to the other ranks, make weights where they belong, and open a session."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh

from stageline.options import Options
from stageline.runtime.accelerators.accelerator import Accelerator
from stageline.runtime.backends.backend import Backend, Collectives, Group
from stageline.runtime.backends.serial import SerialBackend
from stageline.runtime.backends.threads import ThreadsBackend
from stageline.runtime.engine.assembly import assemble
from stageline.runtime.engine.exchange_tied_gradients import broadcast_weights
from stageline.runtime.engine.session import Session
from stageline.runtime.engine.sharded_layers import check_types
from stageline.runtime.exactness.gradient_types import accumulate_in, accumulation_type
from stageline.runtime.exactness.tied_weights import TiedWeights
from stageline.runtime.optimizers.stage_optimizers import StageOptimizers
from stageline.runtime.placement.checks import is_asynchronous
from stageline.runtime.placement.layout import Layout
from stageline.runtime.placement.materialise import Init, materialise
from stageline.runtime.placement.move_layers import move_to_devices
from stageline.runtime.settings import Settings
from stageline.schedules.placement import ranks_of
from stageline.schedules.schedule import Schedule

Devices = tuple[torch.device | None, ...]  # by rank
Accelerators = tuple[Accelerator | None, ...]  # by rank as well


def open_backend(
    name: str,
    schedule: Schedule,
    devices: Devices,
    accelerators: Accelerators,
    mesh: DeviceMesh | None,
    options: Options,
) -> Backend:
    """Return the backend of a name; a new one gets its line here."""
    if name == "serial":
        return SerialBackend(accelerators)
    if name == "threads":
        return ThreadsBackend(accelerators)
    from stageline.runtime.backends.processes.backend import ProcessesBackend  # noqa: PLC0415
    from stageline.runtime.backends.processes.groups import backends_of, connect  # noqa: PLC0415

    stages = range(schedule.num_stages) if schedule.replicas else ()
    siblings = [ranks_of(schedule.placement, schedule.replicas, stage) for stage in stages]
    groups = connect(
        mesh,
        schedule.num_ranks,
        options.timeout,
        siblings,
        backend=backends_of(accelerators),
        shares_memory=options.shared_memory and not any(accelerators),
    )
    return ProcessesBackend(
        groups, devices, accelerators, options.timeout, fixed_forms=options.fixed_message_forms
    )


def ranks_of_process(backend: Backend, schedule: Schedule) -> frozenset[int]:
    """Return the ranks that run in this process."""
    return frozenset(r for r in range(schedule.num_ranks) if backend.collectives.has(r))


def open_session(
    layout: Layout, settings: Settings, backend: Backend, seed: int, init_fn: Init | None
) -> Session:
    """Make the weights of this process's layers, and everything that trains them."""
    collectives, layers, schedule = backend.collectives, layout.layers, layout.schedule
    places = layout.device_of_layer
    blanks = materialise(layers, places, places.__getitem__, seed, init_fn)
    move_to_devices(layers, places)
    if (dtype := accumulation_type(settings.accumulate)) is not None:
        check_types(layers, dtype)
        accumulate_in(layers.modules.parameters(), dtype)
    tied = TiedWeights.of(layers, layout.accelerator_of_layer)
    broadcast_weights(tied, layout, collectives)
    _broadcast_to_siblings(layout, collectives)
    if layers.recording is not None:
        layers.recording.update_model()
    optimizers = None
    if settings.optimizer_fn is not None:
        functions = settings.optimizer_fn, settings.scheduler_fn
        measures = is_asynchronous(schedule)
        optimizers = StageOptimizers.of(layout, *functions, settings.max_norm, measures=measures)
    assembly = assemble(layout, settings, collectives, tied, optimizers)
    return Session(assembly, backend, optimizers, blanks, seed)


def _broadcast_to_siblings(layout: Layout, collectives: Collectives) -> None:
    """Give a stage on several ranks the weights and buffers that the first of them has."""
    if collectives.size(Group.SIBLINGS) > 1:
        for tensor in layout.state_dict().values():
            gathered = collectives.all_gather(
                tensor.detach().contiguous(), "the weights of a stage", Group.SIBLINGS
            )
            tensor.data.copy_(gathered()[0])
