"""Calibrate the times of layers that ran alone by those of the stages of a trial pipeline.

Layers take less together than alone, by an overhead that a stage has once, and because an input
is still in the cache; or more, because a stage holds more memory, which is new to the operating
system. The overhead is measured by a layer without work; the rest is in proportion to time:

    stage = overhead + scale × (layer - overhead + layer - overhead + …)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stageline.planning.profiling.time_layers import ActionSeconds
from stageline.planning.profiling.trial.trial_pipeline import TrialStep, median_actions
from stageline.schedules.action import Kind

WHOLE = {"forward": Kind.F, "backward": Kind.B}
IN_HALVES = {"forward_in_halves": Kind.F, "input_grad": Kind.I, "weight_grad": Kind.W}


def calibrate(
    layers: Sequence[ActionSeconds],
    overhead: ActionSeconds,
    stages: Sequence[range],
    rounds: Sequence[Sequence[TrialStep]],
) -> list[ActionSeconds]:
    """Return times of layers by which the stages take what they took in the trial.

    A round has a step of each schedule; without any, the times stay as they are.
    """
    if not rounds:
        return list(layers)
    whole, in_halves = (median_actions(steps) for steps in zip(*rounds, strict=True))
    found: list[ActionSeconds] = []
    for stage, numbers in enumerate(stages):
        together = {name: whole[kind, stage] for name, kind in WHOLE.items()}
        together |= {name: in_halves[kind, stage] for name, kind in IN_HALVES.items()}
        found += _calibrate_stage([layers[number] for number in numbers], overhead, together)
    return found


def _calibrate_stage(
    layers: Sequence[ActionSeconds], overhead: ActionSeconds, together: Mapping[str, float]
) -> list[ActionSeconds]:
    columns = {
        name: _scaled([getattr(layer, name) for layer in layers], getattr(overhead, name), time)
        for name, time in together.items()
    }
    return [
        layer._replace(**dict(zip(columns, row, strict=True)))
        for layer, row in zip(layers, zip(*columns.values(), strict=True), strict=True)
    ]


def _scaled(times: Sequence[float], overhead: float, together: float) -> list[float]:
    """Scale what is beyond the overhead, such that the sum is `together` if it counts once.

    >>> _scaled([1.0, 2.0], overhead=0.5, together=1.5)
    [0.75, 1.25]
    """
    work = [max(0.0, time - overhead) for time in times]
    if not sum(work):
        return list(times)
    scale = max(0.0, together - overhead) / sum(work)
    return [min(time, overhead) + scale * own for time, own in zip(times, work, strict=True)]
