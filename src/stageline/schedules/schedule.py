"""A schedule: for each rank, the order of its compute actions, and where each stage is placed.

A schedule of several mini-batches holds the optimizer's steps as well, one for each mini-batch and
stage, and its actions name the versions of the weights that they use.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import cast

from stageline.arguments import check_type, shown
from stageline.errors import ScheduleError
from stageline.files import write_text
from stageline.limits import MOST_STAGES, check_most
from stageline.schedules import csv
from stageline.schedules.action import COMPUTE, NO_VERSION, Action, Kind
from stageline.schedules.grid import grid
from stageline.schedules.placement import Placement, Replicas, rank_of, stages_by_rank

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
    replicas: Replicas = ()  # of each stage, on ranks from its placement on; (): one of each

    def __post_init__(self) -> None:
        """Lists become tuples: a schedule that was checked must not change."""
        object.__setattr__(self, "actions", as_rows(self.actions))
        object.__setattr__(self, "placement", as_numbers("placement", self.placement))
        object.__setattr__(self, "replicas", as_numbers("replicas", self.replicas))

    @staticmethod
    def of(actions: Iterable[Iterable[Action]], placement: Placement, name: str = "") -> Schedule:
        return Schedule(tuple(tuple(row) for row in actions), placement, name)

    @staticmethod
    def from_text(*rows: str, name: str = "") -> Schedule:
        """One string per rank, actions apart by blanks."""
        for row in rows:
            check_type("a row", row, str, "write it like '0F0 0B0'")
        check_most("the number of ranks", len(rows), MOST_STAGES)
        actions = tuple(tuple(csv.parse_cells(row.split(), rank)) for rank, row in enumerate(rows))
        placement, replicas = _placement(actions)
        return Schedule(actions, placement, name, replicas)

    @staticmethod
    def from_csv(path: str | Path) -> Schedule:
        """Read a file of ours or torch's; sends and receives are left out, for `lower` to add."""
        rows = csv.read(path)
        actions = tuple(tuple(a for a in row if is_scheduled(a)) for row in rows)
        placement, replicas = _placement(actions)
        return Schedule(actions, placement, Path(path).stem, replicas)

    def to_csv(self, path: str | Path) -> None:
        """Write a row for each rank, an action in each cell."""
        write_text(path, csv.render(self.actions), ScheduleError)

    def __repr__(self) -> str:
        sizes = f"num_ranks={self.num_ranks}, num_stages={self.num_stages}"
        each = f"num_microbatches={self.num_microbatches}"
        stream = f", num_minibatches={self.num_minibatches}" if self.is_stream else ""
        return f"Schedule({self.name!r}, {sizes}, {each}{stream})"

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
    def total_microbatches(self) -> int:
        """Of all mini-batches."""
        return 1 + max((a.microbatch for row in self.actions for a in row), default=-1)

    @cached_property
    def num_minibatches(self) -> int:
        """As many as there are steps of the optimizer; one, if it holds none."""
        steps = (a.version for row in self.actions for a in row if a.kind is Kind.STEP)
        return max(max(steps, default=1), 1)

    @property
    def num_microbatches(self) -> int:
        """Of one mini-batch."""
        return self.total_microbatches // self.num_minibatches

    @cached_property
    def is_stream(self) -> bool:
        """Whether its actions name versions of weights, and optimizer steps are among them."""
        return any(a.version != NO_VERSION for row in self.actions for a in row)

    def rank_of(self, stage: int, microbatch: int) -> int:
        """The rank that runs a micro-batch on a stage."""
        return rank_of(self.placement, self.replicas, stage, microbatch)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        return self._stages[rank]

    @cached_property
    def _stages(self) -> list[tuple[int, ...]]:
        return stages_by_rank(self.placement, self.num_ranks, self.replicas)


def as_rows(actions: object) -> Rows:
    """Return rows of actions as tuples; raise `ScheduleError` if that is not what is given."""
    rows = actions if _is_list(actions) else (actions,)
    found = []
    for row in cast("Iterable[object]", rows):
        if not _is_list(row):
            raise ScheduleError(
                f"actions has {shown(row)}, but holds a list of actions for each rank: build a "
                "schedule with sl.build_schedule, or read one with sl.Schedule.from_csv"
            )
        found.append(tuple(cast("Iterable[Action]", row)))
        for action in found[-1]:
            if type(action) is not Action:
                raise ScheduleError(
                    f"actions has {shown(action)} in a row, but holds sl.Action values: "
                    "sl.Schedule.from_text reads text like '0F0 0B0'"
                )
    return tuple(found)


def as_numbers(name: str, values: object) -> tuple[int, ...]:
    """Return whole numbers as a tuple; raise `ScheduleError` if that is not what is given."""
    found = tuple(cast("Iterable[int]", values)) if _is_list(values) else (None,)
    if not all(map(is_whole, found)):
        raise ScheduleError(
            f"{name} is {shown(values)}, but has to be whole numbers, one for each stage"
        )
    return cast("tuple[int, ...]", found)


def _is_list(value: object) -> bool:
    """An action is a tuple too, but not of actions."""
    return isinstance(value, Iterable) and not isinstance(value, str | bytes | Action)


def is_whole(number: object) -> bool:
    """Whether a value is a whole number; numpy's are too, True is not."""
    return type(number) is int or (isinstance(number, Integral) and not isinstance(number, bool))


def is_scheduled(action: Action) -> bool:
    """Whether an action of a program is one of its schedule, and not for `lower` to add."""
    is_step = action.kind is Kind.STEP and action.version != NO_VERSION
    return action.kind in COMPUTE or is_step


def _placement(actions: Rows) -> tuple[Placement, Replicas]:
    """A stage lives where its forwards run: a file does not say it otherwise."""
    ranks: dict[int, set[int]] = {}
    for rank, row in enumerate(actions):
        for action in row:
            if action.kind is Kind.F:
                ranks.setdefault(action.stage, set()).add(rank)
    homes = {stage: min(found) for stage, found in ranks.items()}
    missing = [str(stage) for stage in range(max(homes, default=-1) + 1) if stage not in homes]
    if not homes:
        raise ScheduleError(
            "no forward in any row, but every stage of a schedule needs one: is this a schedule?"
        )
    if missing:
        raise ScheduleError(
            f"no forward of stage {', '.join(missing[:8])}, but a stage after it has one: add it"
        )
    placement = tuple(homes[stage] for stage in range(len(homes)))
    counts = tuple(len(ranks[stage]) for stage in range(len(homes)))
    has_steps = any(a.kind is Kind.STEP for row in actions for a in row)
    return placement, counts if has_steps and max(counts) > 1 else ()
