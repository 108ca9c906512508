"""When a rank begins and ceases to hold more than one version of a stage's weights.

    F0@0 F1@0 B0@0 STEP@1 F2@1 B1@0 STEP@2 B2@1 STEP@3
                   +1          -1   +1     -1

A step makes a copy only if the weights before it will still be used; else it works in place. The
copy goes with its last use. The latest version is held anyway.
"""

from __future__ import annotations

from collections.abc import Sequence

from stageline.schedules.action import NO_VERSION, Action, Kind


def version_changes(row: Sequence[Action]) -> list[int]:
    """For each action of a rank, 1 if it makes a copy of its stage, -1 if it is the last to use it.

    >>> from stageline.schedules.schedule import Schedule
    >>> rows = Schedule.from_text("0F0@0 0F1@0 0B0@0 0STEP@1 0B1@0 0STEP@2").actions
    >>> version_changes(rows[0])
    [0, 0, 0, 1, -1, 0]
    """
    if all(action.version == NO_VERSION for action in row):
        return [0] * len(row)  # as in all that a planner asks for, hundreds of times
    last_use = {
        (action.stage, action.version): position
        for position, action in enumerate(row)
        if action.kind is not Kind.STEP
    }
    latest: dict[int, int] = {}  # version of each stage
    changes = [0] * len(row)
    for position, (stage, kind, _, _, version) in enumerate(row):
        if kind is Kind.STEP:
            changes[position] = int(last_use.get((stage, version - 1), -1) > position)
            latest[stage] = version
        elif version < latest.get(stage, 0):
            changes[position] = -int(last_use[stage, version] == position)
    return changes
