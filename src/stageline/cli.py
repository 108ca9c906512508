"""The `stageline` command: schedules drawn and simulated without importing torch, and the demo."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TextIO, cast

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer.core import TyperGroup

from stageline import __version__
from stageline.arguments import shown
from stageline.costs import Costs, Link
from stageline.errors import CostsError, PlanError, ReportError, ScheduleError, StagelineError
from stageline.files import checked_path, read_json
from stageline.report.files import WRITERS
from stageline.report.summary import number, percent, share_range
from stageline.report.timeline import Timeline
from stageline.schedules.build import FAMILIES, build_schedule, family_of, schedule_names
from stageline.schedules.check import check
from stageline.schedules.schedule import Schedule
from stageline.simulation.simulate import simulate

if TYPE_CHECKING:
    from stageline.planning.profiling.profile_result import Profile


class Commands(TyperGroup):
    """All commands: Ctrl-C ends each of them with a line, and as shells expect."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            typer.echo("interrupted", err=True)
            raise typer.Exit(INTERRUPTED) from None


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Pipeline-parallel training: every schedule checked, simulated and drawn before it runs.",
)
TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what its processes find
BAD_INPUT = 2  # the exit code of a command that was asked for something impossible
INTERRUPTED = 130  # by Ctrl-C: 128 + SIGINT
FAMILY_LIST = "\n\n".join(f"[b]{name}[/b]  {family.summary}" for name, family in FAMILIES.items())

Sched = Annotated[str, typer.Argument(help="A name from the list below, or a CSV file.")]
Scheds = Annotated[list[str], typer.Argument(help="Names, CSV files, or [b]all[/b].")]
Ranks = Annotated[int, typer.Option("--ranks", "-p", help="Number of ranks.")]
Microbatches = Annotated[int, typer.Option("--microbatches", "-m", help="Per mini-batch.")]
Chunks = Annotated[int | None, typer.Option("--chunks", "-v", help="Stages held by each rank.")]
Group = Annotated[int | None, typer.Option("--group-size", help="For interleaved_1f1b.")]
Memory = Annotated[
    str | None,
    typer.Option("--memory-limit", help="For searched schedules: micro-batches, or e.g. 22GiB."),
]
Budget = Annotated[float | None, typer.Option("--time-budget", help="Seconds to search for.")]
Minibatches = Annotated[
    int | None,
    typer.Option(
        "--minibatches", help="That follow each other; asynchronous schedules have several."
    ),
]
VerticalSync = Annotated[
    bool | None,
    typer.Option("--vertical-sync", help="For pipedream: one version of weights on all stages."),
]
Replicas = Annotated[
    str | None, typer.Option("--replicas", help="For pipedream: ranks of each stage, as in 3,1.")
]
CostsFile = Annotated[
    Path | None,
    typer.Option("--costs", help='JSON like {"forward": 1.1, "parameters": [4e9, 3e9, …]}.'),
]
PerRank = Annotated[
    str | None,
    typer.Option(
        help="For a rank's whole share of the model, or a list, one per stage: 1,1.2,0.9."
    ),
]
Save = Annotated[
    list[Path] | None,
    typer.Option("--save", "-o", help="Write .svg, .html, .json (Perfetto) or .csv; repeatable."),
]


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_show_version)
    ] = False,
) -> None:
    """Options of the command itself."""


@app.command(epilog=FAMILY_LIST)
def draw(
    schedule: Sched,
    ranks: Ranks = 4,
    microbatches: Microbatches = 8,
    chunks: Chunks = None,
    group_size: Group = None,
    memory_limit: Memory = None,
    time_budget: Budget = None,
    minibatches: Minibatches = None,
    vertical_sync: VerticalSync = None,
    replicas: Replicas = None,
    forward: PerRank = None,
    input_grad: PerRank = None,
    weight_grad: PerRank = None,
    transfer: PerRank = None,
    activation: PerRank = None,
    retained: PerRank = None,
    costs: CostsFile = None,
    save: Save = None,
) -> None:
    """Draw a schedule as a grid of ranks and time, and as pictures in files.

    [dim]stageline draw zbv -p 8 -m 24 --weight-grad 0.6 --save zbv.svg --save zbv.csv[/dim]

    [dim]stageline draw pipedream -p 4 -m 1 --minibatches 8[/dim]
    """
    times = (forward, input_grad, weight_grad, transfer, activation, retained)
    options = _options(
        chunks_per_rank=chunks,
        group_size=group_size,
        memory_limit=_number_or_text(memory_limit),
        time_budget=time_budget,
        vertical_sync=vertical_sync,
        replicas=_counts(replicas),
    )
    given = _file_costs(costs) | _given_costs(times)
    request = Request(ranks, microbatches, minibatches, options, given)
    _check_targets(save or [])
    built, timeline = request.run(schedule)
    with _saved(save or [], built, timeline):
        _print_grid(timeline)


@app.command("simulate", epilog=FAMILY_LIST)
def simulate_schedules(
    schedules: Scheds,
    ranks: Ranks = 4,
    microbatches: Microbatches = 8,
    chunks: Chunks = None,
    group_size: Group = None,
    memory_limit: Memory = None,
    time_budget: Budget = None,
    minibatches: Minibatches = None,
    vertical_sync: VerticalSync = None,
    replicas: Replicas = None,
    forward: PerRank = None,
    input_grad: PerRank = None,
    weight_grad: PerRank = None,
    transfer: PerRank = None,
    activation: PerRank = None,
    retained: PerRank = None,
    costs: CostsFile = None,
    save: Save = None,
) -> None:
    """Compare schedules: time, bubbles and memory, and how far from the best possible.

    [dim]stageline simulate 1f1b zb_h1 zbv -p 8 -m 24 --forward 1.1 --transfer 0.05[/dim]

    [dim]stageline simulate 1f1b pipedream_2bw -p 8 -m 8 --minibatches 20[/dim]

    Of several schedules, each takes the options that it knows; what cannot be built is said why.
    Asynchronous ones, which need several mini-batches, are among [b]all[/b] with --minibatches.
    """
    times = (forward, input_grad, weight_grad, transfer, activation, retained)
    options = _options(
        chunks_per_rank=chunks,
        group_size=group_size,
        memory_limit=_number_or_text(memory_limit),
        time_budget=time_budget,
        vertical_sync=vertical_sync,
        replicas=_counts(replicas),
    )
    given = _file_costs(costs) | _given_costs(times)
    request = Request(ranks, microbatches, minibatches, options, given)
    everything = schedule_names(synchronous=None if minibatches else True)
    names = [n for name in schedules for n in (everything if name == "all" else (name,))]
    if len(names) > 1:
        if save:
            raise ReportError(f"--save was given with {len(names)} schedules: give one schedule")
        _compare(names, request)
        return
    _check_targets(save or [])
    built, timeline = request.run(names[0])
    with _saved(save or [], built, timeline):
        _print(_comparison([timeline]), "", _rank_table(timeline))


@app.command(epilog=FAMILY_LIST)
def verify(
    model: Annotated[str, typer.Argument(help="module:function, as in [b]my_model:build[/b].")],
    schedules: Annotated[
        list[str] | None, typer.Argument(help="Names; all synchronous ones, if none.")
    ] = None,
    ranks: Ranks = 2,
    microbatches: Microbatches = 4,
    recompute: Annotated[str, typer.Option(help="never, always or except_last.")] = "never",
    backend: Annotated[str, typer.Option(help="threads or serial.")] = "threads",
) -> None:
    """Hold pipelines of your model to a plain loop: every gradient, buffer and loss, to the bit.

    [dim]stageline verify my_model:build 1f1b zbv -p 4 -m 8[/dim]

    The function takes nothing and returns model, loss_fn, inputs and target: a model for
    sl.Pipeline, and one mini-batch of its data.
    """
    with _loading():
        from stageline.reference import call  # noqa: PLC0415
        from stageline.verification import Case, verify_each  # noqa: PLC0415
    names = schedules or schedule_names(synchronous=True)
    _check_synchronous(names)
    case = Case.of(call(model))
    given = {"num_ranks": ranks, "num_microbatches": microbatches}
    words = {True: "equal to the bit", False: "[red]differs[/red]", None: "[dim]not possible[/dim]"}
    found = []
    for outcome in verify_each(case, names, **given, recompute=recompute, backend=backend):
        reason = f"  [dim]{escape(outcome.reason)}[/dim]" if outcome.reason else ""
        _print(f"{outcome.schedule:<18} {words[outcome.is_equal]}{reason}")
        found.append(outcome.is_equal)
    if False in found or not any(found):
        raise typer.Exit(1)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def run(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(help="A Python script; what follows is for it.")],
    ranks: Ranks = 2,
    max_restarts: Annotated[int, typer.Option(help="Start all again if one fails.")] = 0,
) -> None:
    """Run a script as several processes on this machine: torchrun, on loopback only.

    [dim]stageline run --ranks 4 train.py --lr 0.1[/dim]

    The script calls torch.distributed.init_process_group(), and is the same that torchrun starts
    on many machines.
    """
    with _loading():
        from stageline.launch import launch  # noqa: PLC0415
    with _stopped_in_a_line():
        launch(script, context.args, ranks, max_restarts)


@app.command()
def demo(
    folder: Annotated[Path, typer.Argument(help="Where its files go.")] = Path("demo"),
    steps: Annotated[int, typer.Option(min=1, help="Steps of the optimizer.")] = 320,
    ranks: Ranks = 4,
    schedule: Annotated[
        str, typer.Option(help="A name, see [b]stageline draw --help[/b].")
    ] = "1f1b",
) -> None:
    """Train a small GPT, compare it with a plain loop to the bit, and draw what was measured.

    [dim]stageline demo --steps 100 --schedule zb_h1[/dim]

    Writes [b]demo.svg[/b], [b]gpt.safetensors[/b] and [b]sample.txt[/b]. Ctrl-C ends the training
    early and goes on with the rest.
    """
    _check_synchronous([schedule])
    with _loading():
        from stageline.demo import run  # noqa: PLC0415  other commands do without torch

    for path in run(folder, steps=steps, ranks=ranks, schedule=schedule):
        typer.echo(f"wrote {path}", err=True)


@app.command()
def profile(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODULE:FUNCTION", help="Returns model, loss_fn, inputs, target."),
    ] = None,
    links: Annotated[bool, typer.Option("--links", help="Measure links, and no model.")] = False,
    ranks: Annotated[int, typer.Option(help="That many at once, to share the cores.")] = 1,
    memory: Annotated[
        str | None, typer.Option(help="With --links: of a device, like 22GiB.")
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option("--save", "-o", help="Or else profile.json; with --links cluster.json."),
    ] = None,
) -> None:
    """Measure what each layer of your model costs, or the links between processes.

    [dim]stageline profile my_model:build --ranks 2 --save profile.json[/dim]

    [dim]stageline profile --links --ranks 2[/dim], on this machine, or on several, on each of them:

    [dim]torchrun --nnodes 2 … -m stageline profile --links --memory 22GiB[/dim]

    The file is for [b]stageline plan --cluster[/b].
    """
    if (model is None) != links:
        seen = "both are given" if links else "neither is given"
        raise PlanError(f"a model and --links: {seen}, but one of them is measured: give one")
    if model is None:
        _profile_links(ranks, memory, save or Path("cluster.json"))
        return
    if memory is not None:
        raise PlanError("--memory was given, but a profile of a model has its own: use --links")
    path = save or Path("profile.json")
    _check_target(path)
    found = _profiled(model, ranks)
    found.save(path)
    typer.echo(str(found))
    typer.echo(f"wrote {path}", err=True)


@app.command()
def plan(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="MODULE:FUNCTION, or a profile as JSON.")
    ],
    batch: Annotated[int, typer.Option(help="Samples of a step, of all replicas together.")],
    devices: Annotated[int | None, typer.Option(help="How many there are, all alike.")] = None,
    memory: Annotated[str | None, typer.Option(help="Of each of them, like 22GiB.")] = None,
    cluster: Annotated[Path | None, typer.Option(help="A cluster as JSON, instead.")] = None,
    optimizer: Annotated[str, typer.Option(help="sgd, momentum, adagrad, adam, adamw.")] = "adamw",
    schedules: Annotated[
        list[str] | None,
        typer.Option("--schedule", help="A name, once for each; all synchronous ones, if none."),
    ] = None,
    ranks: Annotated[int, typer.Option(help="To profile at once, if they share cores.")] = 1,
    save: Annotated[Path, typer.Option("--save", "-o", help="Where to write it.")] = Path(
        "plan.json"
    ),
) -> None:
    """Find the fastest way to train your model that fits in the devices' memory.

    [dim]stageline plan my_model:build --devices 8 --memory 22GiB --batch 512[/dim]

    [dim]stageline plan profile.json --devices 4 --memory 22GiB --batch 96 --schedule 1f1b
    --schedule pipedream[/dim]

    Asynchronous schedules, and replicas of single stages with them, are looked at if named.

    Prints ranked ways with what is expected of them, and the timeline of the best;
    [b]sl.Pipeline(model, loss_fn, plan=sl.Plan.load("plan.json"))[/b] takes it.
    """
    with _loading():
        from stageline.planning.cluster.cluster import Cluster  # noqa: PLC0415
        from stageline.planning.plan import plan as search  # noqa: PLC0415
        from stageline.planning.profiling.profile_result import Profile  # noqa: PLC0415
        from stageline.planning.search.candidate_schedules import DEFAULT_SCHEDULES  # noqa: PLC0415
    if cluster is None and (devices is None or memory is None):
        raise PlanError("there is no cluster, but one is needed: --devices and --memory, or a file")
    _check_target(save)
    machines = Cluster.load(cluster) if cluster else Cluster(devices or 0, memory)
    is_file = model.endswith(".json")
    costs = Profile.load(model) if is_file else _profiled(model, ranks)
    with Console(stderr=True).status("planning") as status:
        found = search(
            costs,
            machines,
            batch_size=batch,
            optimizer=optimizer,
            schedules=schedules or DEFAULT_SCHEDULES,
            progress=lambda count, words: status.update(f"planning: {count} tried, {words}"),
        )
    found.save(save)
    typer.echo(f"{found}\n")
    _print_grid(found.timeline)
    typer.echo(f"wrote {save}", err=True)


@contextmanager
def _loading(console: Console | None = None) -> Iterator[None]:
    """Import torch, which takes a second or more; a Ctrl-C that an import swallows is not lost."""
    asked = []

    def interrupt(number: int, _: object) -> NoReturn:
        asked.append(number)
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    is_ours = before is signal.default_int_handler  # not ignored, and in the main thread
    if is_ours and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, interrupt)
    try:
        with (console or Console(stderr=True)).status("loading PyTorch"):
            yield
    finally:
        if signal.getsignal(signal.SIGINT) is interrupt:
            signal.signal(signal.SIGINT, before)
    if asked:
        raise KeyboardInterrupt


def _profile_links(ranks: int, memory: str | None, path: Path) -> None:
    """As one of the processes that torchrun has started, or by starting them here."""
    if set(TORCHRUN) <= os.environ.keys():
        _take_part(memory, path)
        return
    if ranks < 2:
        raise PlanError(
            f"--links was given with {ranks} rank, but a link needs 2: use --ranks 2, or start "
            "this with torchrun"
        )
    with _loading():
        from stageline.launch import launch_module  # noqa: PLC0415
        from stageline.planning.cluster.cluster import Device  # noqa: PLC0415
    given = ["--memory", str(Device(memory).memory_bytes)] if memory else []
    with _stopped_in_a_line():
        launch_module("stageline", ["profile", "--links", "--save", str(path), *given], ranks)


@contextmanager
def _stopped_in_a_line() -> Iterator[None]:
    """A signal that ended all processes is told in a line, and by the exit code of a shell."""
    from stageline.launch import Stopped  # noqa: PLC0415  imports torch

    try:
        yield
    except Stopped as stop:
        typer.echo(str(stop), err=True)
        raise typer.Exit(128 + stop.number) from None


def _take_part(memory: str | None, path: Path) -> None:
    """All ranks measure, the first one tells."""
    is_first = os.environ["RANK"] == "0"
    console = Console(stderr=True, quiet=not is_first)
    with _loading(console):
        import torch.distributed as dist  # noqa: PLC0415

        from stageline.planning.cluster.measure_links import measure_links  # noqa: PLC0415
    with console.status("waiting for the other ranks"):
        dist.init_process_group("gloo")
    try:
        cluster = measure_links(memory=memory)
    finally:
        dist.destroy_process_group()
    if is_first:
        cluster.save(path)
        typer.echo(str(cluster))
        typer.echo(f"wrote {path}", err=True)


def _profiled(model: str, ranks: int) -> Profile:
    with _loading():
        from stageline.planning.profiling.profile import profile as measure  # noqa: PLC0415
        from stageline.reference import call  # noqa: PLC0415
        from stageline.verification import Case  # noqa: PLC0415
    case = Case.of(call(model))
    return measure(case.model, case.inputs, loss_fn=case.loss_fn, target=case.target, ranks=ranks)


@dataclass(frozen=True)
class Request:
    """What the command line asks for, apart from the schedule."""

    ranks: int
    microbatches: int
    minibatches: int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    given: dict[str, Any] = field(default_factory=dict)  # costs; a number is for a whole rank

    def run(self, name: str) -> tuple[Schedule, Timeline]:
        """Build and simulate, as `build_schedule` and `simulate` do for the same costs."""
        if name.lower().endswith(".csv"):
            schedule = Schedule.from_csv(name)
            check(schedule)
            costs = self.costs(max(schedule.num_stages // schedule.num_ranks, 1))
            return schedule, simulate(schedule, costs)
        chunks = self.options.get("chunks_per_rank", family_of(name).chunks)
        costs = self.costs(chunks)
        schedule = build_schedule(
            name,
            num_ranks=self.ranks,
            num_microbatches=self.microbatches,
            num_minibatches=self.minibatches,
            costs=costs if self.given else None,
            **self.options,
        )
        return schedule, simulate(schedule, costs)

    def costs(self, chunks: int) -> Costs:
        """A rank's share is split evenly over its chunks, so that schedules can be compared."""
        return Costs.of_a_rank(chunks, **self.given)


COMPARED_MINIBATCHES = 8  # where a schedule needs several and no number is given
GIVEN = ("forward", "input_grad", "weight_grad", "transfer", "activation", "retained")


def _options(**given: object) -> dict[str, Any]:
    """What was given, by the names of `build_schedule`."""
    return {name: value for name, value in given.items() if value is not None}


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


def _check_synchronous(names: Iterable[str]) -> None:
    for name in names:
        if name in schedule_names(synchronous=False):
            raise ScheduleError(
                f"{name!r} is asynchronous: its weights change while micro-batches are on their "
                "way, and no plain loop gives its numbers; use one of "
                f"{', '.join(schedule_names(synchronous=True))}"
            )


def _given_costs(texts: tuple[str | None, ...]) -> dict[str, float | list[float]]:
    pairs = zip(GIVEN, texts, strict=True)
    return {name: _per_stage(name, text) for name, text in pairs if text is not None}


def _per_stage(name: str, text: str) -> float | list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError as error:
        option = "--" + name.replace("_", "-")
        raise CostsError(
            f"{option} is {text!r}, but has to be a number, or one per stage"
        ) from error
    return numbers if len(numbers) > 1 else numbers[0]


def _file_costs(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    values = read_json(path, CostsError)
    if not isinstance(values, dict):
        raise CostsError(f"{path} holds {type(values).__name__}, but costs are a JSON object")
    unknown = sorted(set(values) - set(Costs.__dataclass_fields__))
    if unknown:
        known = ", ".join(Costs.__dataclass_fields__)
        raise CostsError(f"{path} has {', '.join(map(shown, unknown))}, but costs are {known}")
    if isinstance(values.get("links"), dict):
        values["links"] = _link(path, values["links"])
    return values


def _link(path: Path, values: dict[str, Any]) -> Link:
    if not values.keys() <= Link.__dataclass_fields__.keys():
        raise CostsError(
            f"{path} has links {shown(values)}, but a link is a latency and a bandwidth"
        )
    return Link(**values)


def _compare(names: list[str], request: Request) -> None:
    """A row for each schedule; each takes the options that it knows, and one at least must."""
    families = {name: FAMILIES[name].options for name in names if name in FAMILIES}
    for option in request.options:
        if not any(option in options for options in families.values()):
            raise ScheduleError(f"{option} was given, but none of {', '.join(names)} takes it")
    timelines, refusals = [], []
    if set(names) & set(schedule_names(synchronous=False)):  # the same work for all
        request = replace(request, minibatches=request.minibatches or COMPARED_MINIBATCHES)
    for name in names:
        options = {o: v for o, v in request.options.items() if o in families.get(name, ())}
        try:
            timelines.append(replace(request, options=options).run(name)[1])
        except StagelineError as error:
            refusals.append(f"{name}: {error}")
    if not timelines:
        raise ScheduleError("none of the schedules can be built\n" + "\n".join(refusals))
    _print(_comparison(timelines))
    for refusal in refusals:
        typer.echo(refusal, err=True)


def _comparison(timelines: list[Timeline]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("schedule")
    columns = ["makespan", "at best", "step bubble", "span bubble", "peak activations"]
    are_streams = any(timeline.schedule.is_stream for timeline in timelines)
    for column in columns + ["fill to drain busy"] * are_streams:
        table.add_column(column, justify="right")
    for timeline in timelines:
        row = [
            escape(timeline.name),
            number(timeline.makespan),
            number(timeline.lower_bound) if timeline.lower_bound else "–",
            percent(timeline.step_bubble),
            percent(timeline.span_bubble),
            number(max(timeline.peak_activations)),
        ]
        busy = share_range(timeline.steady_busy) if timeline.steady_busy else "–"
        table.add_row(*row, *[busy] * are_streams)
    return table


def _rank_table(timeline: Timeline) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("rank", "busy", "span", "peak activations", "peak memory"):
        table.add_column(column, justify="right")
    rows = zip(
        timeline.busy,
        timeline.rank_spans,
        timeline.peak_activations,
        timeline.peak_memory,
        strict=True,
    )
    for rank, row in enumerate(rows):
        table.add_row(str(rank), *map(number, row))
    return table


def _print(*parts: Any) -> None:
    console = Console(width=None if sys.stdout.isatty() else 120)
    for part in parts:
        console.print(part, highlight=False)


def _print_grid(timeline: Timeline) -> None:
    if sys.stdout.isatty():
        from stageline.report.text.terminal import coloured  # noqa: PLC0415  not needed in a pipe

        console = Console()
        _print(coloured(timeline, console.width, max(8, console.height - 1)))
    else:
        typer.echo(str(timeline))


def _check_targets(paths: list[Path]) -> None:
    """Before a search that may take a while, not after it."""
    for path in paths:
        if path.suffix.lower() not in (".csv", *WRITERS):
            raise ReportError(f"{path} cannot be saved: use .svg, .html, .json or .csv")
        _check_target(path)


def _check_target(path: Path) -> None:
    checked_path(path, ReportError)
    if path.is_dir() or not path.parent.is_dir():
        raise ReportError(f"{path} cannot be saved: use a file in a folder that exists")


@contextmanager
def _saved(paths: list[Path], schedule: Schedule, timeline: Timeline) -> Iterator[None]:
    """Write files first, whoever reads what is printed then; print even if one fails."""
    written = []
    try:
        for path in paths:
            if path.suffix.lower() == ".csv":
                schedule.to_csv(path)
            else:
                timeline.save(path)
            written.append(path)
    finally:
        yield
        for path in written:
            typer.echo(f"wrote {path}", err=True)


class Output(io.TextIOBase):
    """Standard output whose reader may leave early, as in `stageline demo | head`.

    The command goes on without it: what it was asked to write is written, and its exit code says
    what came of it. State: whether the reader is gone.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.is_read = stream, True

    def write(self, text: str) -> int:
        self._while_read(lambda: self.stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._while_read(self.stream.flush)

    def _while_read(self, work: Callable[[], object]) -> None:
        try:
            if self.is_read:
                work()
        except BrokenPipeError:
            self.is_read = False
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.stream.fileno())  # for what is still buffered
            os.close(nowhere)

    def isatty(self) -> bool:
        return self.stream.isatty()

    def fileno(self) -> int:
        return self.stream.fileno()

    def writable(self) -> bool:
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]  # a plain attribute there
        return self.stream.encoding

    @property
    def errors(self) -> str | None:  # type: ignore[override]  # as above
        return self.stream.errors


def main() -> None:
    """The command, with mistakes told in a line and no traceback."""
    if sys.stdout is None:  # closed by who started this
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115  as long as the process
    before, sys.stdout = sys.stdout, cast("TextIO", Output(sys.stdout))
    try:
        app()
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _fail(f"{where}{error.strerror or error}")
    except StagelineError as error:
        _fail(str(error))
    except MemoryError:
        _fail("there is not enough memory for this: use smaller sizes")
    finally:
        sys.stdout = before


def _fail(message: str) -> NoReturn:
    typer.echo(f"error: {message}", err=True)
    raise SystemExit(BAD_INPUT) from None
