"""A plan: how to train a model on a cluster, what that should take, and what else was looked at."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any, cast

from pydantic import Field

from stageline.arguments import check_type, shown
from stageline.costs import PER_STAGE, Costs
from stageline.errors import PlanError
from stageline.limits import MOST_COUNT, MOST_PLAN_BYTES
from stageline.planning.checked import Amount, Count, Whole, checked, read_json, write_json
from stageline.planning.tables import table
from stageline.report.summary import percent
from stageline.report.timeline import Timeline
from stageline.schedules.build import family_of, schedule_names
from stageline.schedules.check import check
from stageline.schedules.schedule import Schedule
from stageline.simulation.simulate import simulate
from stageline.units import format_bytes


@checked
class Option:
    """One way to train, with what is expected of it."""

    schedule: str
    num_ranks: Count
    replicas: Count
    num_microbatches: Count
    samples: Count  # of a micro-batch
    recompute: Annotated[Whole, Field(ge=0, le=MOST_COUNT)]  # stages that run their forwards again
    seconds: Amount  # of a step; asynchronous, from one mini-batch to the next at full pace
    bubble: Amount  # idle share of all ranks
    peak_memory: Amount  # bytes, of the fullest rank
    verdict: str = ""  # why it is not the plan
    chunks: Count = 1  # stages of a rank
    offload: bool = False  # activations wait on the host
    side_by_side: bool = False  # the replicas of a rank are neighbours, not the ranks of a replica
    stage_replicas: tuple[Count, ...] = ()  # ranks of each stage; (): one, or several stages each

    def __post_init__(self) -> None:
        family_of(self.schedule)  # raises if there is none
        if not self.stage_replicas:
            return
        counts = list(self.stage_replicas)
        if not self.is_asynchronous:
            raise PlanError(
                f"stage_replicas is {counts}, but {self.schedule!r} has one rank for each stage: "
                "leave it out, or use 'pipedream'"
            )
        if sum(counts) != self.num_ranks or any(self.num_microbatches % n for n in counts):
            raise PlanError(
                f"stage_replicas is {counts}, but {self.num_ranks} ranks and "
                f"{self.num_microbatches} micro-batches need numbers with the sum "
                f"{self.num_ranks} that divide {self.num_microbatches}: plan anew"
            )
        if self.replicas > 1:
            raise PlanError(
                f"stage_replicas is {counts} beside {self.replicas} replicas of the pipeline, but "
                "either stages have replicas or all of it has: plan anew"
            )

    @property
    def is_asynchronous(self) -> bool:
        """Whether weights change while micro-batches are on their way."""
        return self.schedule in schedule_names(synchronous=False)

    @property
    def words(self) -> str:
        replicas = f" × {self.replicas} replicas" if self.replicas > 1 else ""
        replicas += " side by side" if self.side_by_side else ""
        chunks = f" of {self.chunks} stages" if self.chunks > 1 else ""
        if self.stage_replicas:
            chunks = f", stages on {', '.join(map(str, self.stage_replicas))} of them"
        again = f", {self.recompute} stages recomputed" if self.recompute else ""
        again += ", activations on the host" if self.offload else ""
        return (
            f"{self.schedule} on {self.num_ranks} ranks{chunks}{replicas}, "
            f"{self.num_microbatches} micro-batches of {self.samples}{again}"
        )


@checked
class Plan:
    """What `sl.plan` found; `sl.Pipeline(model, loss_fn, plan=plan)` takes it."""

    layers: tuple[str, ...]  # names: a plan is for one model
    balance: tuple[Count, ...]
    recompute: tuple[bool, ...]  # by stage
    actions: tuple[str, ...]  # the schedule, a row for each rank: '0F0 0F1 0B0 …'
    costs: dict[str, tuple[Amount, ...]]  # by field of Costs, by stage; seconds and bytes
    peak_memory: tuple[Amount, ...]  # bytes, by rank
    batch_size: Count
    chosen: Option
    others: tuple[Option, ...] = ()

    def __post_init__(self) -> None:
        """What its parts say of layers, ranks and stages has to be the same."""
        schedule = self.schedule
        check(schedule)
        pairs: dict[str, tuple[object, object]] = {
            "stage_replicas": (list(self.chosen.stage_replicas), list(schedule.replicas)),
            "stages": (len(self.balance), schedule.num_stages),
            "stages that are recomputed or not": (len(self.recompute), schedule.num_stages),
            "ranks": (self.chosen.num_ranks, schedule.num_ranks),
            "ranks with a peak of memory": (len(self.peak_memory), schedule.num_ranks),
            "micro-batches": (self.chosen.num_microbatches, schedule.num_microbatches),
        }
        for name, (here, there) in pairs.items():
            if here != there:
                raise PlanError(f"{name}: the plan says {here}, but its actions {there}: plan anew")
        if sum(self.balance) != len(self.layers):
            raise PlanError(
                f"the plan has {len(self.layers)} layers, but {sum(self.balance)} in its stages: "
                "plan anew"
            )
        if unknown := sorted(self.costs.keys() - set(PER_STAGE)):
            raise PlanError(
                f"costs has {shown(unknown[0])}, but costs are {', '.join(PER_STAGE)}: plan anew"
            )
        Costs(**cast("dict[str, Any]", self.costs)).check_num_stages(schedule.num_stages)

    @cached_property
    def schedule(self) -> Schedule:
        return replace(Schedule.from_text(*self.actions), name=self.chosen.schedule)

    @cached_property
    def timeline(self) -> Timeline:
        """What is expected of a step, in milliseconds, as measured ones are.

        Of an asynchronous schedule, as many mini-batches as show its pace.
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
        """Samples a second."""
        return self.batch_size / self.chosen.seconds if self.chosen.seconds else math.inf

    @property
    def recompute_modes(self) -> tuple[str, ...]:
        return tuple("always" if again else "never" for again in self.recompute)

    def save(self, path: str | os.PathLike[str]) -> None:
        """As JSON."""
        write_json(path, self)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        return read_json(path, Plan, MOST_PLAN_BYTES)

    def check(self, layers: tuple[str, ...]) -> None:
        """Raise unless it is for a model with these layers."""
        if layers != self.layers:
            pairs = zip(layers, self.layers, strict=False)
            apart = next((n for n, (a, b) in enumerate(pairs) if a != b), None)
            where = "" if apart is None else f"; layer {apart} is {layers[apart]!r} here and "
            where += "" if apart is None else f"{self.layers[apart]!r} there"
            raise PlanError(
                f"the model has {len(layers)} layers, but the plan is for one of "
                f"{len(self.layers)}{where}: plan for this model"
            )

    def __str__(self) -> str:
        columns = ("plan", "step, ms", "samples/s", "bubble", "peak memory", "")
        every = (self.chosen, *self.others)
        options = table(columns, map(self._row, every), left=("plan", ""))
        balance = ", ".join(map(str, self.balance))
        memory = ", ".join(format_bytes(size) for size in self.peak_memory)
        lines = [options, f"layers by stage: {balance}", f"peak memory by rank: {memory}"]
        if streams := {each.schedule for each in every if each.is_asynchronous}:
            names = ", ".join(sorted(streams))
            lines.append(
                f"{names}: a step is the time from one mini-batch to the next once the pipeline is "
                "full; gradients are of earlier weights"
            )
        return "\n".join(lines)

    def _row(self, option: Option) -> tuple[str, ...]:
        return (
            option.words,
            f"{1e3 * option.seconds:.4g}",
            f"{self.batch_size / option.seconds:.4g}" if option.seconds else "–",
            percent(option.bubble),
            format_bytes(option.peak_memory),
            option.verdict,
        )


def planned(
    plan: Plan, layers: Sequence[str], given: tuple[object, object, object]
) -> tuple[int, int, tuple[int, ...]]:
    """Ranks, micro-batches and balance; raises if it is for another model, or others are given."""
    check_type("plan", plan, Plan, "use sl.plan, or sl.Plan.load", PlanError)
    plan.check(tuple(layers))
    says = plan.chosen.num_ranks, plan.chosen.num_microbatches, plan.balance
    names = "num_ranks", "num_microbatches", "balance"
    for name, here, there in zip(names, given, says, strict=True):
        if here is not None and here != there:
            raise PlanError(f"{name} is {here}, but the plan says {there}: leave {name} away")
    return says


def costs_as_numbers(costs: Costs, num_stages: int) -> dict[str, tuple[float, ...]]:
    """By field, all that is not as it is without being given."""
    given = (name for name in PER_STAGE if getattr(costs, name) != getattr(Costs(), name))
    return {name: costs.per_stage(name, num_stages) for name in given}
