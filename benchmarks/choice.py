"""What the planner chooses, and the fastest of all ways to train: two ranks on two cores.

    python benchmarks/choice.py             all models, about half an hour
    python benchmarks/choice.py --rounds 3

For each model every schedule with every size of micro-batch is run, in rounds, so that what slows
the machine down for a while slows all of them down. The fastest five then run once more in turns
with the one that was chosen: the fastest of many noisy times is too fast by chance.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from time import perf_counter
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

import stageline as sl
from stageline.errors import ScheduleError
from stageline.model.workload import Workload
from stageline.planning.search.candidate_builder import CandidateBuilder
from stageline.planning.search.candidate_schedules import DEFAULT_SCHEDULES, build_sized
from stageline.planning.search.enumerate_candidates import enumerate_candidates
from stageline.planning.search.predict_time import StepTimePredictor
from stageline.planning.search.search import FOUND_BY_SEARCH
from stageline.planning.search.search_result import EvaluatedCandidate
from stageline.planning.search.training_layouts import PlanRequest
from stageline.zoo.workloads import WORKLOADS, profile_workload

RANKS, STEPS, BEST, FINALS = 2, 2, 5, 9


def all_plans(request: PlanRequest) -> list[sl.Plan]:
    """Return plans for every schedule, number of chunks and micro-batch size, cut evenly."""
    plans, predictor = [], StepTimePredictor()
    for candidate in enumerate_candidates(CandidateBuilder(request), DEFAULT_SCHEDULES):
        name, count = candidate.schedule_name, candidate.layout.num_microbatches
        costs = candidate.costs if name in FOUND_BY_SEARCH else None
        try:
            schedule = build_sized(name, RANKS, count, candidate.chunks, costs=costs)
        except ScheduleError:
            continue
        prediction = predictor.predict(candidate, schedule)
        plans.append(EvaluatedCandidate(candidate, schedule, prediction).to_plan(request))
    return plans


def step_times(case: Workload, plan: sl.Plan, steps: int) -> list[float]:
    """Seconds; the first step of a pipeline does not count."""
    pipe = sl.Pipeline(case.model, case.loss_fn, plan=plan)
    taken = []
    for _ in range(steps + 1):
        start = perf_counter()
        pipe.step(case.inputs, case.target)
        taken.append(perf_counter() - start)
    for parameter in pipe.parameters():
        parameter.grad = None
    pipe.close()
    return taken[1:]


def medians(case: Workload, plans: Sequence[sl.Plan], rounds: int, words: str) -> list[float]:
    """In turns, each round from another one on."""
    taken: list[list[float]] = [[] for _ in plans]
    for turn in track(range(rounds * len(plans)), words):
        number = (turn + turn // len(plans)) % len(plans)
        taken[number] += step_times(case, plans[number], STEPS)
    return [median(times) for times in taken]


def compared(name: str, rounds: int) -> tuple[str, float]:
    """A table of the best, and by how much the chosen one is slower."""
    case = WORKLOADS[name]()
    request = PlanRequest(
        profile_workload(case, RANKS),
        sl.Cluster(num_devices=RANKS, memory="8GiB"),
        len(case.inputs),
        "sgd",
        RANKS,
        recompute=False,
    )
    chosen = sl.plan(
        request.profile, request.cluster, batch_size=request.batch_size, num_ranks=RANKS
    )
    plans = all_plans(request)
    times = medians(case, plans, rounds, f"{name}: {len(plans)} ways")
    first = sorted(range(len(plans)), key=lambda number: times[number])[:BEST]
    finals = [*(plans[number] for number in first), chosen]
    again = medians(case, finals, FINALS, f"{name}: the best {BEST} and the chosen one")
    table = Table(box=None, header_style="bold")
    for column in (name, "predicted, ms", "measured, ms"):
        table.add_column(column, justify="left" if column == name else "right")
    for plan, seconds in zip(finals, again, strict=True):
        words = f"{'chosen: ' if plan is chosen else ''}{plan.chosen.description}"
        table.add_row(words, f"{1e3 * plan.chosen.seconds:.1f}", f"{1e3 * seconds:.1f}")
    Console(width=140).print(table)
    return name, 100 * (again[-1] / min(again) - 1)


def main(
    rounds: Annotated[int, typer.Option(help="Of all ways, before the best are compared.")] = 1,
    model: Annotated[str, typer.Option(help="Only this one.")] = "",
) -> None:
    """Print the best ways to train each model, and how far the chosen one is from them."""
    torch.set_num_threads(1)
    for name, slower in [compared(name, rounds) for name in WORKLOADS if model in ("", name)]:
        print(f"{name}: chosen within {slower:.1f} % of the best")


if __name__ == "__main__":
    typer.run(main)
