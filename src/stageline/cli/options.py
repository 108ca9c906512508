"""The options that commands share, and the request for a schedule that some of them make up.

Each option has the name of the Python parameter that it sets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any

import typer

from stageline.costs import Costs, read_costs
from stageline.errors import CostsError, ScheduleError
from stageline.report.timeline import Timeline
from stageline.schedules.build import build_schedule, family_of, schedule_names
from stageline.schedules.check import check
from stageline.schedules.families.registry import FAMILIES
from stageline.schedules.schedule import Schedule
from stageline.simulation.simulate import simulate

FAMILY_LIST = "\n\n".join(f"[b]{name}[/b]  {family.summary}" for name, family in FAMILIES.items())
PER_RANK = "One number for a rank's whole share of the model, or one per stage: 1,1.2,0.9."

NumRanks = Annotated[int, typer.Option("--num-ranks", "-p", help="Ranks in the pipeline.")]
NumMicrobatches = Annotated[
    int, typer.Option("--num-microbatches", "-m", help="Micro-batches per mini-batch.")
]
NumMinibatches = Annotated[
    int | None,
    typer.Option(
        "--num-minibatches",
        help="Consecutive mini-batches. Asynchronous schedules run several by default.",
    ),
]
ChunksPerRank = Annotated[
    int | None, typer.Option("--chunks-per-rank", "-v", help="Stages on each rank.")
]
GroupSize = Annotated[
    int | None,
    typer.Option(
        "--group-size", help="Micro-batches that a chunk runs in a row (interleaved_1f1b only)."
    ),
]
MemoryLimit = Annotated[
    str | None,
    typer.Option(
        "--memory-limit",
        help="Activation memory per rank for searched schedules, in micro-batches or e.g. 22GiB.",
    ),
]
TimeBudget = Annotated[
    float | None, typer.Option("--time-budget", help="Seconds to spend on searched schedules.")
]
VerticalSync = Annotated[
    bool | None,
    typer.Option(
        "--vertical-sync", help="Use the same weight version on all stages (pipedream only)."
    ),
]
Replicas = Annotated[
    str | None,
    typer.Option("--replicas", help="Ranks that share each stage, e.g. 3,1 (pipedream only)."),
]
Forward = Annotated[str | None, typer.Option("--forward", help=f"Forward time. {PER_RANK}")]
InputGrad = Annotated[
    str | None, typer.Option("--input-grad", help="Time of the input gradient, in the same form.")
]
WeightGrad = Annotated[
    str | None, typer.Option("--weight-grad", help="Time of the weight gradient.")
]
Transfer = Annotated[
    str | None, typer.Option("--transfer", help="Time to send a value to another rank.")
]
Activation = Annotated[
    str | None, typer.Option("--activation", help="Memory held from the forward to the backward.")
]
Retained = Annotated[
    str | None,
    typer.Option("--retained", help="The part of it that the weight gradient still needs."),
]
CostsFile = Annotated[
    Path | None,
    typer.Option(
        "--costs", help='JSON file with costs: {"forward": 1.1, "parameters": [4e9, 3e9, …]}.'
    ),
]
SavePictures = Annotated[
    list[Path] | None,
    typer.Option("--save", "-o", help="Write .svg, .html, .json (Perfetto) or .csv; repeatable."),
]
SaveFile = Annotated[Path, typer.Option("--save", "-o", help="File to write.")]
NumProcesses = Annotated[
    int, typer.Option("--num-processes", "-n", help="Processes to start on this machine.")
]
Jobs = Annotated[
    int,
    typer.Option(
        "--jobs",
        "-j",
        help="Ranks profiled concurrently, as they will share the cores.",
    ),
]
DeviceMemory = Annotated[
    str | None, typer.Option("--memory", help="Memory of each device, e.g. 22GiB.")
]


@dataclass(frozen=True)
class ScheduleRequest:
    """The sizes, options and costs given on the command line, for a schedule of any name."""

    num_ranks: int
    num_microbatches: int
    num_minibatches: int | None = None
    options: dict[str, Any] = field(default_factory=dict)  # for `build_schedule`
    costs: dict[str, Any] = field(default_factory=dict)  # a single number is for a whole rank

    def run(self, name: str) -> tuple[Schedule, Timeline]:
        """Build the schedule, or read it from a CSV file, and simulate it with the costs."""
        if name.lower().endswith(".csv"):
            schedule = Schedule.from_csv(name)
            check(schedule)
            costs = self._stage_costs(max(schedule.num_stages // schedule.num_ranks, 1))
            return schedule, simulate(schedule, costs)
        costs = self._stage_costs(self.options.get("chunks_per_rank", family_of(name).chunks))
        schedule = build_schedule(
            name,
            num_ranks=self.num_ranks,
            num_microbatches=self.num_microbatches,
            num_minibatches=self.num_minibatches,
            costs=costs if self.costs else None,
            **self.options,
        )
        return schedule, simulate(schedule, costs)

    def _stage_costs(self, chunks_per_rank: int) -> Costs:
        """Divide each rank's costs evenly over its chunks, so that schedules can be compared."""
        return Costs.of_a_rank(chunks_per_rank, **self.costs)


def schedule_request(
    *,
    num_ranks: NumRanks = 4,
    num_microbatches: NumMicrobatches = 8,
    num_minibatches: NumMinibatches = None,
    chunks_per_rank: ChunksPerRank = None,
    group_size: GroupSize = None,
    memory_limit: MemoryLimit = None,
    time_budget: TimeBudget = None,
    vertical_sync: VerticalSync = None,
    replicas: Replicas = None,
    forward: Forward = None,
    input_grad: InputGrad = None,
    weight_grad: WeightGrad = None,
    transfer: Transfer = None,
    activation: Activation = None,
    retained: Retained = None,
    costs: CostsFile = None,
) -> ScheduleRequest:
    """Return the request that these options describe."""
    options = {
        "chunks_per_rank": chunks_per_rank,
        "group_size": group_size,
        "memory_limit": _number_or_text(memory_limit),
        "time_budget": time_budget,
        "vertical_sync": vertical_sync,
        "replicas": _counts(replicas),
    }
    texts = {
        "forward": forward,
        "input_grad": input_grad,
        "weight_grad": weight_grad,
        "transfer": transfer,
        "activation": activation,
        "retained": retained,
    }
    given = {name: _numbers(name, text) for name, text in texts.items() if text is not None}
    return ScheduleRequest(
        num_ranks,
        num_microbatches,
        num_minibatches,
        {name: value for name, value in options.items() if value is not None},
        (read_costs(costs) if costs else {}) | given,
    )


def with_schedule_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of `schedule_request`, whose result it takes as `request`."""
    shared = signature(schedule_request, eval_str=True).parameters
    parameters: list[Parameter] = []
    for parameter in signature(command, eval_str=True).parameters.values():
        parameters += shared.values() if parameter.name == "request" else [parameter]

    @wraps(command)
    def wrapper(**given: Any) -> None:
        request = schedule_request(**{name: given.pop(name) for name in shared})
        command(request=request, **given)

    # Typer reads a command's options from its signature.
    keyword_only = [each.replace(kind=Parameter.KEYWORD_ONLY) for each in parameters]
    wrapper.__signature__ = Signature(keyword_only)  # type: ignore[attr-defined]  # inspect's hook
    wrapper.__annotations__ = {each.name: each.annotation for each in parameters}
    return wrapper


def check_synchronous(names: Iterable[str]) -> None:
    """Raise `ScheduleError` if a schedule is asynchronous."""
    for name in names:
        if name in schedule_names(synchronous=False):
            raise ScheduleError(
                f"{name!r} is asynchronous: its weights change while micro-batches are in flight, "
                "so no plain loop gives the same numbers; use one of "
                f"{', '.join(schedule_names(synchronous=True))}"
            )


def _numbers(name: str, text: str) -> float | list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError as error:
        option = "--" + name.replace("_", "-")
        raise CostsError(
            f"{option} is {text!r}, but has to be a number, or one per stage"
        ) from error
    return numbers if len(numbers) > 1 else numbers[0]


def _number_or_text(text: str | None) -> float | str | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return text


def _counts(text: str | None) -> list[int] | None:
    try:
        return None if text is None else [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ScheduleError(
            f"--replicas is {text!r}, but has to be a number for each stage, as in 3,1"
        ) from error
