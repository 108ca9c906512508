"""`pipe.replan`: look for a better cut by measured times, and move layers to their new ranks."""

from __future__ import annotations

from collections.abc import Sequence

from torch.optim import Optimizer

from stageline.errors import ModelError
from stageline.model.split import cut
from stageline.planning.profiling.profile import Profile
from stageline.planning.replan import Observed, Replan, observed, replanned, slowest
from stageline.report.timeline import Timeline
from stageline.runtime.engine.assembly import assemble
from stageline.runtime.engine.everywhere import everywhere
from stageline.runtime.engine.recorder import Recorder
from stageline.runtime.engine.session import Session
from stageline.runtime.exactness.shared_buffers import check_shared_norms
from stageline.runtime.exactness.tied_weights import TiedWeights
from stageline.runtime.placement.move_layers import (
    GroupsOptions,
    OptimizerState,
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
    """Cut the layers of a session anew, if traced steps say that this is worth it."""
    session.check_idle()
    if session.optimizers is not None:
        raise ModelError(
            "replan was called, but the pipeline has an optimizer for each stage, and layers "
            "cannot change theirs: save, build another with the new balance, and load"
        )
    layout, collectives = session.assembly.layout, session.assembly.collectives
    measured = [t.timeline if isinstance(t, Recorder) else t for t in timelines]
    told = everywhere(collectives, lambda: _observed(session, optimizer, measured, profile))
    times = slowest([each for each, _ in told])
    # the first one's, in case that another machine rounds otherwise
    found = everywhere(collectives, lambda: replanned(layout.schedule, layout.balance, times))[0]
    if found.moves:
        _move(session, found.new_balance, optimizer, [options for _, options in told])
    return found


def _observed(
    session: Session,
    optimizer: Optimizer | None,
    timelines: Sequence[Timeline],
    profile: Profile | None,
) -> tuple[Observed, GroupsOptions | None]:
    """Return what this process knows before a replan: times, and its optimizer's options."""
    layout = session.assembly.layout
    names = tuple(layer.name for layer in layout.layers)
    times = observed(layout.schedule, layout.balance, names, timelines, profile)
    check_optimizer(optimizer, layout.layers, layout.parameters())
    return times, options_of(optimizer)


def _move(
    session: Session,
    balance: Sequence[int],
    optimizer: Optimizer | None,
    options: Sequence[GroupsOptions | None],
) -> None:
    """Move layers to their new ranks; nothing changes unless all processes can do their part."""
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
    tied = TiedWeights.of(layers, layout.device_of_layer)
    trusts = all(stage.deterministic_layers.trusts for stage in old.stages)
    session.assembly = assemble(layout, old.settings, collectives, tied, None)
    for stage in session.assembly.stages:
        stage.deterministic_layers.trusts &= trusts
