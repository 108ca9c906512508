"""Compute what layers save by being in one stage: their times alone against those of a trial."""

from __future__ import annotations

from collections.abc import Sequence

from stageline.planning.profiling.time_layers import ActionSeconds
from stageline.planning.profiling.trial.stage_overheads import NO_SAVINGS, JointSavings
from stageline.planning.profiling.trial.trial_pipeline import TrialStep, median_actions
from stageline.schedules.action import Kind

WHOLE = {"forward": Kind.F, "backward": Kind.B}
IN_HALVES = {"forward_in_halves": Kind.F, "input_grad": Kind.I, "weight_grad": Kind.W}


def joint_savings(
    layers: Sequence[ActionSeconds], num_stages: int, rounds: Sequence[Sequence[TrialStep]]
) -> JointSavings:
    """Return the savings at each joint, from the trial's steps; a round has one of each schedule.

    All layers are in its stages, so the times of all stages are those of all layers, less the
    savings at their joints.
    """
    num_joints = len(layers) - num_stages
    if not num_joints or not rounds:
        return NO_SAVINGS
    found = {}
    for kinds, steps in zip((WHOLE, IN_HALVES), zip(*rounds, strict=True), strict=True):
        actions = median_actions(steps)
        for name, kind in kinds.items():
            together = sum(actions[kind, stage] for stage in range(num_stages))
            alone = sum(getattr(layer, name) for layer in layers)
            found[name] = (alone - together) / num_joints
    return JointSavings(**found)
