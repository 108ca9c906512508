"""pipe.replan: choose a better balance by measured times, and move layers to their new ranks."""

from __future__ import annotations

from collections.abc import Sequence

from torch.optim import Optimizer

from stageline.errors import ModelError
from stageline.model.split import cut
from stageline.planning.profiling.profile_result import Profile
from stageline.planning.replan import (
    MeasuredTimes,
    Replan,
    choose_replan,
    measured_times,
    slowest_replica_times,
)
from stageline.report.timeline import Timeline
from stageline.runtime.engine.assembly import assemble
from stageline.runtime.engine.recorder import Recorder
from stageline.runtime.engine.run_everywhere import everywhere
from stageline.runtime.engine.session import Session
from stageline.runtime.exactness.shared_buffers import check_shared_norms
from stageline.runtime.exactness.tied_weights import TiedWeights
from stageline.runtime.placement.move_layers import (
    GroupsOptions,
    OptimizerState,
    carry_to_devices,
    check_moves,
    check_optimizer,
    move_tensors,
    move_to_devices,
    options_of,
    plan_moves,
)


def replan_session(
    session: Session,
    optimizer: Optimizer | None,
    timelines: Sequence[Timeline],
    profile: Profile | None,
) -> Replan:
    """Change the balance of a session if its traced steps show that this makes steps faster."""
    session.check_idle()
    if session.optimizers is not None:
        raise ModelError(
            "replan was called, but the pipeline has an optimizer for each stage, and layers "
            "cannot change theirs: save, build another with the new balance, and load"
        )
    layout, collectives = session.assembly.layout, session.assembly.collectives
    measured = [t.timeline if isinstance(t, Recorder) else t for t in timelines]
    checked = everywhere(
        collectives, lambda: _times_and_options(session, optimizer, measured, profile)
    )
    times = slowest_replica_times([each for each, _ in checked])
    # the first rank decides: another machine may round differently
    decisions = everywhere(
        collectives, lambda: choose_replan(layout.schedule, layout.balance, times)
    )
    found = decisions[0]
    if found.moves:
        _move(session, found.new_balance, optimizer, [options for _, options in checked])
    return found


def _times_and_options(
    session: Session,
    optimizer: Optimizer | None,
    timelines: Sequence[Timeline],
    profile: Profile | None,
) -> tuple[MeasuredTimes, GroupsOptions | None]:
    """Return the measured times and the options of the optimizer of this process."""
    layout = session.assembly.layout
    names = tuple(layer.name for layer in layout.layers)
    times = measured_times(layout.schedule, layout.balance, names, timelines, profile)
    check_optimizer(optimizer, layout.layers, layout.parameters())
    return times, options_of(optimizer)


def _move(
    session: Session,
    balance: Sequence[int],
    optimizer: Optimizer | None,
    options: Sequence[GroupsOptions | None],
) -> None:
    """Move layers to their new ranks, or raise on all processes before anything has changed."""
    old = session.assembly
    layers, collectives = old.layout.layers, old.collectives
    stages = cut(layers, old.layout.schedule.num_stages, balance)
    check_shared_norms(layers, stages)
    layout = old.layout.with_stages(stages)
    moves = plan_moves(layers, old.layout.rank_of_layer, layout.rank_of_layer, collectives)
    everywhere(collectives, lambda: check_moves(moves, optimizer, options, collectives))
    if moves:
        state = OptimizerState(optimizer)
        move_tensors(moves, state, collectives)
        state.restore_groups(layout.parameters())
    move_to_devices(layers, layout.device_of_layer, optimizer)
    places = old.layout.accelerator_of_layer, layout.accelerator_of_layer
    carry_to_devices(layers, *places)
    tied = TiedWeights.of(layers, places[1])
    session.assembly = assemble(layout, old.settings, collectives, tied, None)
