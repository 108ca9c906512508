"""A schedule: for each rank, the order of its compute actions, and where each stage is placed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from stageline.errors import ScheduleError
from stageline.schedules import csv
from stageline.schedules.action import COMPUTE, Action, Kind
from stageline.schedules.grid import grid
from stageline.schedules.placement import Placement, stages_on

Rows = tuple[tuple[Action, ...], ...]


@dataclass(frozen=True)
class Schedule:
    """What every rank computes, in order. A plain value: `check` judges it, `simulate` times it.

    >>> schedule = Schedule.from_text("0F0 0B0", "1F0 1B0")
    >>> schedule.num_ranks, schedule.num_microbatches, schedule.placement
    (2, 1, (0, 1))
    """

    actions: Rows
    placement: Placement
    name: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        """Lists become tuples: a schedule that was checked must not change."""
        if not all(isinstance(rows, tuple) for rows in (self.actions, *self.actions)):
            object.__setattr__(self, "actions", tuple(tuple(row) for row in self.actions))
        object.__setattr__(self, "placement", tuple(self.placement))

    @staticmethod
    def of(actions: Iterable[Iterable[Action]], placement: Placement, name: str = "") -> Schedule:
        return Schedule(tuple(tuple(row) for row in actions), placement, name)

    @staticmethod
    def from_text(*rows: str, name: str = "") -> Schedule:
        """One string per rank, actions apart by blanks."""
        actions = tuple(tuple(csv.parse_cells(row.split(), rank)) for rank, row in enumerate(rows))
        return Schedule(actions, _placement(actions), name)

    @staticmethod
    def from_csv(path: str | Path) -> Schedule:
        """Read a file of ours or torch's; sends and receives are left out, for `lower` to add."""
        rows = csv.read(Path(path))
        actions = tuple(tuple(a for a in row if a.kind in COMPUTE) for row in rows)
        return Schedule(actions, _placement(actions), Path(path).stem)

    def to_csv(self, path: str | Path) -> None:
        Path(path).write_text(csv.render(self.actions), encoding="utf-8")

    def __repr__(self) -> str:
        sizes = f"num_ranks={self.num_ranks}, num_stages={self.num_stages}"
        return f"Schedule({self.name!r}, {sizes}, num_microbatches={self.num_microbatches})"

    def __str__(self) -> str:
        """A row for each rank."""
        return grid(self.actions)

    @property
    def num_ranks(self) -> int:
        return len(self.actions)

    @property
    def num_stages(self) -> int:
        return len(self.placement)

    @cached_property
    def num_microbatches(self) -> int:
        return 1 + max((a.microbatch for row in self.actions for a in row), default=-1)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        return stages_on(self.placement, rank)


def _placement(actions: Rows) -> Placement:
    """A stage lives where its forwards run: a file does not say it otherwise."""
    homes = {
        a.stage: rank
        for rank, row in reversed(list(enumerate(actions)))
        for a in row
        if a.kind is Kind.F
    }
    missing = [str(stage) for stage in range(max(homes, default=-1) + 1) if stage not in homes]
    if not homes:
        raise ScheduleError(
            "no forward in any row, but every stage of a schedule needs one: is this a schedule?"
        )
    if missing:
        raise ScheduleError(
            f"no forward of stage {', '.join(missing[:8])}, but a stage after it has one: add it"
        )
    return tuple(homes[stage] for stage in range(len(homes)))
