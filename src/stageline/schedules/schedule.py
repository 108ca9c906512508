"""Define `Schedule`: the order of each rank's compute actions, and the placement of the stages.

A schedule of several mini-batches (a stream) also contains the optimizer steps, one for each
mini-batch and stage, and its actions name the versions of the weights that they use.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from numbers import Integral
from pathlib import Path
from typing import cast

from stageline.arguments import RenamedAttribute, check_type, shown
from stageline.errors import ScheduleError
from stageline.files import write_text
from stageline.limits import MOST_SHOWN, MOST_STAGES, check_most
from stageline.schedules import csv
from stageline.schedules.action import COMPUTE, NO_VERSION, Action, Kind
from stageline.schedules.marked_grid import grid
from stageline.schedules.placement import Placement, Replicas, rank_of, stages_by_rank

Rows = tuple[tuple[Action, ...], ...]


@dataclass(frozen=True)
class Schedule:
    """The ordered compute actions of every rank; an immutable value.

    >>> schedule = Schedule.from_text("0F0 0B0", "1F0 1B0")
    >>> schedule.num_ranks, schedule.num_microbatches, schedule.placement
    (2, 1, (0, 1))
    """

    actions: Rows
    placement: Placement
    name: str = field(default="", compare=False)
    replicas: Replicas = ()  # of each stage, on consecutive ranks; () means one each

    def __post_init__(self) -> None:
        """Convert lists to tuples: a schedule that was checked must not change."""
        object.__setattr__(self, "actions", as_rows(self.actions))
        object.__setattr__(self, "placement", as_numbers("placement", self.placement))
        object.__setattr__(self, "replicas", as_numbers("replicas", self.replicas))

    @staticmethod
    def of(actions: Iterable[Iterable[Action]], placement: Placement, name: str = "") -> Schedule:
        """Build a schedule from any iterables of actions."""
        return Schedule(tuple(tuple(row) for row in actions), placement, name)

    @staticmethod
    def from_text(*rows: str, name: str = "") -> Schedule:
        """Build a schedule from one string per rank, with actions separated by spaces."""
        for row in rows:
            check_type("a row", row, str, "write it like '0F0 0B0'")
        check_most("the number of ranks", len(rows), MOST_STAGES)
        actions = tuple(tuple(csv.parse_cells(row.split(), rank)) for rank, row in enumerate(rows))
        placement, replicas = _placement(actions)
        return Schedule(actions, placement, name, replicas)

    @staticmethod
    def from_csv(path: str | Path) -> Schedule:
        """Read a CSV file of Stageline or torch, without its communication, which `lower` adds."""
        rows = csv.read(path)
        actions = tuple(tuple(a for a in row if is_scheduled(a)) for row in rows)
        placement, replicas = _placement(actions)
        return Schedule(actions, placement, Path(path).stem, replicas)

    def to_csv(self, path: str | Path) -> None:
        """Write a CSV file with one row per rank and one action per cell."""
        write_text(path, csv.render(self.actions), ScheduleError)

    def __repr__(self) -> str:
        sizes = f"num_ranks={self.num_ranks}, num_stages={self.num_stages}"
        each = f"num_microbatches={self.num_microbatches}"
        stream = f", num_minibatches={self.num_minibatches}" if self.is_stream else ""
        return f"Schedule({self.name!r}, {sizes}, {each}{stream})"

    def __str__(self) -> str:
        """Return one line per rank."""
        return grid(self.actions)

    def _repr_html_(self) -> str:
        """Return a picture, for notebooks: the timeline if all stages take the same time."""
        import stageline as sl  # noqa: PLC0415  the simulator and pictures are above schedules

        count = sum(map(len, self.actions))
        if count > MOST_SHOWN:
            return f"<p>{escape(repr(self))}: {count:,} actions are too many to draw here</p>"
        try:
            return sl.simulate(self)._repr_html_()
        except ScheduleError as error:
            return f"<pre>{escape(str(error))}</pre>"

    @property
    def num_ranks(self) -> int:
        return len(self.actions)

    @property
    def num_stages(self) -> int:
        return len(self.placement)

    @cached_property
    def total_microbatches(self) -> int:
        """Return the number of micro-batches in all mini-batches together."""
        return 1 + max((a.microbatch for row in self.actions for a in row), default=-1)

    @cached_property
    def num_minibatches(self) -> int:
        """Return the number of optimizer steps, or 1 if the schedule has none."""
        steps = (a.version for row in self.actions for a in row if a.kind is Kind.STEP)
        return max(max(steps, default=1), 1)

    @property
    def num_microbatches(self) -> int:
        """Return the number of micro-batches in one mini-batch."""
        return self.total_microbatches // self.num_minibatches

    @cached_property
    def is_stream(self) -> bool:
        """Return whether actions name weight versions, and optimizer steps are included."""
        return any(a.version != NO_VERSION for row in self.actions for a in row)

    home = RenamedAttribute("rank_of")

    def rank_of(self, stage: int, microbatch: int) -> int:
        """Return the rank that runs a micro-batch on a stage."""
        return rank_of(self.placement, self.replicas, stage, microbatch)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that a rank holds, ascending."""
        return self._stages[rank]

    @cached_property
    def _stages(self) -> list[tuple[int, ...]]:
        return stages_by_rank(self.placement, self.num_ranks, self.replicas)


def as_rows(actions: object) -> Rows:
    """Return rows of actions as tuples; raise `ScheduleError` for anything else."""
    rows = actions if _is_list(actions) else (actions,)
    found = []
    for row in cast("Iterable[object]", rows):
        if not _is_list(row):
            raise ScheduleError(
                f"actions contains {shown(row)}, but must have a list of actions for each rank: "
                "build a schedule with sl.build_schedule, or read one with sl.Schedule.from_csv"
            )
        found.append(tuple(cast("Iterable[Action]", row)))
        for action in found[-1]:
            if type(action) is not Action:
                raise ScheduleError(
                    f"actions contains {shown(action)} in a row, but must have sl.Action values: "
                    "sl.Schedule.from_text reads text such as '0F0 0B0'"
                )
    return tuple(found)


def as_numbers(name: str, values: object) -> tuple[int, ...]:
    """Return integers as a tuple; raise `ScheduleError` for anything else."""
    found = tuple(cast("Iterable[int]", values)) if _is_list(values) else (None,)
    if not all(map(is_integer, found)):
        raise ScheduleError(f"{name} is {shown(values)}, but must be integers, one for each stage")
    return cast("tuple[int, ...]", found)


def _is_list(value: object) -> bool:
    """Return whether a value is a list or the like; an action, though a tuple, is not."""
    return isinstance(value, Iterable) and not isinstance(value, str | bytes | Action)


def is_integer(number: object) -> bool:
    """Return whether a value is an integer, possibly numpy's; a bool is not."""
    return type(number) is int or (isinstance(number, Integral) and not isinstance(number, bool))


def is_scheduled(action: Action) -> bool:
    """Return whether an action belongs to a schedule; `lower` adds the others."""
    is_step = action.kind is Kind.STEP and action.version != NO_VERSION
    return action.kind in COMPUTE or is_step


def _placement(actions: Rows) -> tuple[Placement, Replicas]:
    """Return each stage's rank and number of replicas, from where its forwards run."""
    ranks: dict[int, set[int]] = {}
    for rank, row in enumerate(actions):
        for action in row:
            if action.kind is Kind.F:
                ranks.setdefault(action.stage, set()).add(rank)
    first_ranks = {stage: min(found) for stage, found in ranks.items()}
    missing = [
        str(stage) for stage in range(max(first_ranks, default=-1) + 1) if stage not in first_ranks
    ]
    if not first_ranks:
        raise ScheduleError(
            "no row has a forward, but every stage of a schedule needs one: is this a schedule?"
        )
    if missing:
        raise ScheduleError(
            f"stage {', '.join(missing[:8])} has no forward, but a later stage has one: add it"
        )
    placement = tuple(first_ranks[stage] for stage in range(len(first_ranks)))
    counts = tuple(len(ranks[stage]) for stage in range(len(first_ranks)))
    has_steps = any(a.kind is Kind.STEP for row in actions for a in row)
    return placement, counts if has_steps and max(counts) > 1 else ()
