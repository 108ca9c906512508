"""Plan: how to train a model on a cluster, the expected time and memory, and the alternatives."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any, cast

from pydantic import Field

from stageline.arguments import RenamedAttribute, check_type, shown
from stageline.costs import PER_STAGE, Costs
from stageline.errors import PlanError
from stageline.limits import MOST_COUNT, MOST_PLAN_BYTES
from stageline.planning.console import format_table
from stageline.planning.partition.stage_costs import modes_of
from stageline.planning.validation import (
    Amount,
    Count,
    WholeNumber,
    read_json,
    validated,
    write_json,
)
from stageline.report.notebook import shortened, table_html, text_html
from stageline.report.summary import percent, recomputation
from stageline.report.timeline import Timeline
from stageline.schedules.build import family_of, schedule_names
from stageline.schedules.check import check
from stageline.schedules.schedule import Schedule
from stageline.simulation.simulate import simulate
from stageline.units import format_bytes

COLUMNS = ("plan", "step, ms", "samples/s", "bubble", "peak memory", "")


@validated
class PlanOption:
    """One configuration for training, with its expected time and memory."""

    schedule: str
    num_ranks: Count
    replicas: Count
    num_microbatches: Count
    samples: Count  # per micro-batch
    recompute: Annotated[WholeNumber, Field(ge=0, le=MOST_COUNT)]  # number of recomputed stages
    seconds: Amount  # per step; if asynchronous, per mini-batch once the pipeline is full
    bubble: Amount  # idle share of all ranks
    peak_memory: Amount  # bytes, of the rank that needs most
    verdict: str = ""  # why it was not chosen
    chunks: Count = 1  # stages per rank
    offload: bool = False  # activations are kept in the host's memory
    side_by_side: bool = False  # the replicas of a rank are neighbours, not the ranks of a replica
    stage_replicas: tuple[Count, ...] = ()  # ranks of each stage; (): no stage has replicas
    selective: Annotated[WholeNumber, Field(ge=0, le=MOST_COUNT)] = 0  # of the recomputed stages

    def __post_init__(self) -> None:
        family_of(self.schedule)  # raises if there is none
        if self.selective > self.recompute:
            raise PlanError(
                f"selective is {self.selective}, but it counts some of the stages in recompute, "
                f"which is {self.recompute}: make a new plan"
            )
        if not self.stage_replicas:
            return
        counts = list(self.stage_replicas)
        if not self.is_asynchronous:
            raise PlanError(
                f"stage_replicas is {counts}, but {self.schedule!r} has one rank for each stage: "
                "omit it, or use 'pipedream'"
            )
        if sum(counts) != self.num_ranks or any(self.num_microbatches % n for n in counts):
            raise PlanError(
                f"stage_replicas is {counts}, but {self.num_ranks} ranks and "
                f"{self.num_microbatches} micro-batches need numbers that add up to "
                f"{self.num_ranks} and divide {self.num_microbatches}: make a new plan"
            )
        if self.replicas > 1:
            raise PlanError(
                f"stage_replicas is {counts} and replicas is {self.replicas}, but either single "
                "stages or the whole pipeline can have replicas: make a new plan"
            )

    @property
    def is_asynchronous(self) -> bool:
        """True if weights are updated while micro-batches are in flight."""
        return self.schedule in schedule_names(synchronous=False)

    words = RenamedAttribute("description")

    @property
    def description(self) -> str:
        """The configuration in one line, without its expected time and memory."""
        replicas = f" × {self.replicas} replicas" if self.replicas > 1 else ""
        replicas += " side by side" if self.side_by_side else ""
        chunks = f" of {self.chunks} stages" if self.chunks > 1 else ""
        if self.stage_replicas:
            chunks = f" ({', '.join(map(str, self.stage_replicas))} by stage)"
        memory = ""
        for count, how in (
            (self.recompute - self.selective, "recomputed"),
            (self.selective, "recomputed selectively"),
        ):
            memory += f", {_plural(count, 'stage')} {how}" if count else ""
        memory += ", activations on the host" if self.offload else ""
        return (
            f"{self.schedule} on {_plural(self.num_ranks, 'rank')}{chunks}{replicas}, "
            f"{_plural(self.num_microbatches, 'micro-batch', 'micro-batches')} of "
            f"{self.samples}{memory}"
        )


@validated
class Plan:
    """The result of `sl.plan`; train with it by `sl.Pipeline(model, loss_fn, plan=plan)`."""

    layers: tuple[str, ...]  # the names of the model's layers
    balance: tuple[Count, ...]  # number of layers of each stage
    recompute: tuple[bool, ...]  # by stage
    actions: tuple[str, ...]  # the schedule, a row for each rank: '0F0 0F1 0B0 …'
    costs: dict[str, tuple[Amount, ...]]  # by field of Costs, by stage; seconds and bytes
    peak_memory: tuple[Amount, ...]  # bytes, by rank
    batch_size: Count
    chosen: PlanOption
    others: tuple[PlanOption, ...] = ()
    has_links: bool = True  # False if the cluster has no levels
    selective: tuple[bool, ...] = ()  # by stage: recomputed selectively; (): none is

    def __post_init__(self) -> None:
        """Raise `PlanError` if the fields disagree about layers, ranks or stages."""
        schedule = self.schedule
        check(schedule)
        pairs: dict[str, tuple[object, object]] = {
            "stage_replicas": (list(self.chosen.stage_replicas), list(schedule.replicas)),
            "number of stages in balance": (len(self.balance), schedule.num_stages),
            "number of stages in recompute": (len(self.recompute), schedule.num_stages),
            "number of stages in selective": (
                len(self.selective),
                schedule.num_stages if self.selective else 0,
            ),
            "num_ranks": (self.chosen.num_ranks, schedule.num_ranks),
            "number of ranks in peak_memory": (len(self.peak_memory), schedule.num_ranks),
            "num_microbatches": (self.chosen.num_microbatches, schedule.num_microbatches),
        }
        for name, (stated, in_actions) in pairs.items():
            if stated != in_actions:
                raise PlanError(
                    f"{name} is {stated}, but the plan's actions have {in_actions}: make a new plan"
                )
        if sum(self.balance) != len(self.layers):
            raise PlanError(
                f"balance adds up to {sum(self.balance)}, but the plan has {len(self.layers)} "
                "layers: make a new plan"
            )
        if any(a and not b for a, b in zip(self.selective, self.recompute, strict=False)):
            raise PlanError("selective has a stage that recompute does not: make a new plan")
        if unknown := sorted(self.costs.keys() - set(PER_STAGE)):
            raise PlanError(
                f"costs has the field {shown(unknown[0])}, but the fields are "
                f"{', '.join(PER_STAGE)}: make a new plan"
            )
        Costs(**cast("dict[str, Any]", self.costs)).check_num_stages(schedule.num_stages)

    @cached_property
    def schedule(self) -> Schedule:
        """The schedule that the plan's actions describe."""
        return replace(Schedule.from_text(*self.actions), name=self.chosen.schedule)

    @cached_property
    def timeline(self) -> Timeline:
        """The expected timeline of a step in milliseconds, the unit of measured timelines.

        For an asynchronous schedule it has enough mini-batches to show its steady state.
        """
        times = ("forward", "input_grad", "weight_grad", "transfer", "recompute", "reduce")
        fields: dict[str, Any] = {
            name: [1e3 * value for value in values] if name in times else values
            for name, values in self.costs.items()
        }
        predicted = simulate(self.schedule, Costs(**fields))
        return replace(predicted, name=f"{self.chosen.schedule}, predicted in ms")

    @property
    def throughput(self) -> float:
        """The expected number of samples per second."""
        return self.batch_size / self.chosen.seconds if self.chosen.seconds else math.inf

    @property
    def recompute_modes(self) -> tuple[str, ...]:
        """The `recompute` argument of `sl.Pipeline`: a mode for each stage."""
        return modes_of(self.recompute, self.selective)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a JSON file."""
        write_json(path, self)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """Read a plan from a JSON file that `save` has written."""
        return read_json(path, Plan, MOST_PLAN_BYTES)

    def check(self, layers: tuple[str, ...]) -> None:
        """Raise `PlanError` unless the plan is for a model with layers of these names."""
        if layers == self.layers:
            return
        pairs = enumerate(zip(layers, self.layers, strict=False))
        difference = next(
            (f"; layer {n} is {here!r} here and {there!r} there" for n, (here, there) in pairs
             if here != there),
            "",
        )  # fmt: skip
        raise PlanError(
            f"the model has {len(layers)} layers, but the plan is for one with "
            f"{len(self.layers)}{difference}: make a plan for this model"
        )

    def __str__(self) -> str:
        table = format_table(COLUMNS, map(self._row, self._options), left=("plan", ""))
        return "\n".join([table, *self._notes()])

    def _repr_html_(self) -> str:
        """Return the table with its notes, for notebooks."""
        rows = map(self._row, self._options)
        table = table_html(COLUMNS, rows, left=("plan", ""), of="plans")
        return table + text_html("\n".join(shortened(note) for note in self._notes()))

    @property
    def _options(self) -> tuple[PlanOption, ...]:
        return (self.chosen, *self.others)

    def _notes(self) -> list[str]:
        lines = [
            f"layers by stage: {', '.join(map(str, self.balance))}",
            f"peak memory by rank: {', '.join(map(format_bytes, self.peak_memory))}",
        ]
        if note := recomputation(self.recompute_modes):
            lines.append(note)
        if not self.has_links and self.chosen.num_ranks * self.chosen.replicas > 1:
            lines.append(self._links_note())
        if names := sorted({each.schedule for each in self._options if each.is_asynchronous}):
            lines.append(
                f"{', '.join(names)}: a step is the time from one mini-batch to the next once the "
                "pipeline is full; gradients are computed with earlier weights"
            )
        return lines

    def _links_note(self) -> str:
        """Return what transfers take if the cluster says nothing of its links."""
        handoff = max(self.costs.get("transfer", (0.0,)))
        cost = "transfers between ranks and reductions over replicas count as free"
        if handoff:
            cost = (
                f"transfers between ranks count as {1e6 * handoff:.3g} µs whatever their size, and "
                "reductions over replicas as free"
            )
        return f"the cluster has no levels of links: {cost}; give levels=, or use stageline links"

    def _row(self, option: PlanOption) -> tuple[str, ...]:
        return (
            option.description,
            f"{1e3 * option.seconds:.4g}",
            f"{self.batch_size / option.seconds:.4g}" if option.seconds else "–",
            percent(option.bubble),
            format_bytes(option.peak_memory),
            option.verdict,
        )


def sizes_from_plan(
    plan: Plan, given: tuple[object, object, object]
) -> tuple[int, int, tuple[int, ...]]:
    """Return a plan's number of ranks, number of micro-batches and balance.

    Raise `PlanError` if one of the three `given` values is not None and differs from the plan's.
    """
    check_type("plan", plan, Plan, "use sl.plan, or sl.Plan.load", PlanError)
    planned = plan.chosen.num_ranks, plan.chosen.num_microbatches, plan.balance
    names = "num_ranks", "num_microbatches", "balance"
    for name, value, expected in zip(names, given, planned, strict=True):
        if value is not None and value != expected:
            raise PlanError(f"{name} is {value}, but the plan says {expected}: omit {name}")
    return planned


def costs_by_stage(costs: Costs, num_stages: int) -> dict[str, tuple[float, ...]]:
    """Return the fields of costs that differ from the defaults, with a number for each stage."""
    given = (name for name in PER_STAGE if getattr(costs, name) != getattr(Costs(), name))
    return {name: costs.per_stage(name, num_stages) for name in given}


def _plural(count: int, singular: str, plural: str = "") -> str:
    return f"{count} {singular if count == 1 else plural or singular + 's'}"
