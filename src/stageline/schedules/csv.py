"""Read and write schedules as CSV, in the format of torch.distributed.pipelining.

A file has one row per rank and one action per cell.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator

from stageline.arguments import shown
from stageline.errors import ScheduleError
from stageline.files import AnyPath, read_text
from stageline.limits import MOST_SCHEDULE_BYTES, MOST_STAGES, check_most
from stageline.schedules.action import (
    COMPUTE,
    NO_PEER,
    ONCE,
    WHOLE_BATCH,
    Action,
    Kind,
    default_peer,
)

# At most six digits: a stage number above a million means that the file is damaged.
ACTION = re.compile(
    r"(\d{1,6})([A-Z](?:[A-Z_]*[A-Z])?)(\d{1,6})?(?:>(\d{1,6}))?(?:@(\d{1,6}))?", re.ASCII
)
# torch's notation for two actions that may overlap
OVERLAPPED = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
SHARDING = ("UNSHARD", "RESHARD")  # torch's FSDP actions, which are skipped


def read(path: AnyPath) -> list[list[Action]]:
    """Return the rows of a file; raise `ScheduleError` if any of it cannot be read."""
    return parse(read_text(path, ScheduleError, MOST_SCHEDULE_BYTES))


def parse(text: str) -> list[list[Action]]:
    """Return the actions of each row; empty cells are skipped."""
    rows: list[list[Action]] = []
    try:
        for rank, row in enumerate(csv.reader(io.StringIO(text))):
            check_most("the number of rows", rank + 1, MOST_STAGES, "is this a schedule?")
            rows.append(list(parse_cells(row, rank)))
    except csv.Error as error:
        raise ScheduleError(f"the text is not valid CSV: {error}") from error
    return rows


def render(rows: Iterable[Iterable[Action]]) -> str:
    """Return rows of actions as CSV."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([str(action) for action in row] for row in rows)
    return out.getvalue()


def parse_cells(cells: Iterable[str], rank: int) -> Iterator[Action]:
    """Yield the actions of one row."""
    for column, cell in enumerate(cells):
        if not cell:
            continue
        pair = OVERLAPPED.fullmatch(cell.strip())
        for part in pair[1].split(";") if pair else [cell]:
            if action := _parse_action(part.strip(), rank, column):
                yield action


def _parse_action(cell: str, rank: int, column: int) -> Action | None:
    if not cell:
        return None
    match = ACTION.fullmatch(cell)
    if match and match[2] in SHARDING:
        return None
    if not match or match[2] not in Kind.__members__:
        raise ScheduleError(
            f"row {rank}, column {column} is {shown(cell)}, but an action looks like 2F0: a stage, "
            "then F, I, W or B, then a micro-batch"
        )
    seen = f"row {rank}, column {column} is {cell!r}"
    action = _action(int(match[1]), Kind(match[2]), match[3], match[4], seen)
    return _with_version(action, match[5], seen)


def _action(stage: int, kind: Kind, microbatch: str | None, peer: str | None, seen: str) -> Action:
    if (microbatch is None) != (kind in ONCE):
        raise ScheduleError(
            f"{seen}, but {kind.value} takes {'no' if kind in ONCE else 'a'} micro-batch"
        )
    if kind in COMPUTE or kind in ONCE:
        if peer is not None:
            raise ScheduleError(f"{seen}, but only sends and receives have a peer")
        return Action(stage, kind, WHOLE_BATCH if microbatch is None else int(microbatch), NO_PEER)
    return Action(
        stage, kind, int(microbatch or 0), default_peer(stage, kind) if peer is None else int(peer)
    )


def _with_version(action: Action, version: str | None, seen: str) -> Action:
    if version is None:
        return action
    if action.kind not in COMPUTE and action.kind not in ONCE:
        raise ScheduleError(f"{seen}, but sends and receives have no version")
    return action._replace(version=int(version))
