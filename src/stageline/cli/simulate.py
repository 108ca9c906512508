"""`stageline simulate`: the time, bubbles and memory of one schedule or several, as tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from stageline.cli.options import SavePictures, ScheduleRequest, with_schedule_options
from stageline.cli.output import check_pictures, print_rich, saving
from stageline.errors import ReportError, ScheduleError, StagelineError
from stageline.report.summary import number, percent, share_range
from stageline.report.timeline import Timeline
from stageline.schedules.build import schedule_names
from stageline.schedules.families.registry import FAMILIES

COMPARED_MINIBATCHES = 8  # if an asynchronous schedule is compared and no number is given


@with_schedule_options
def simulate(
    schedules: Annotated[
        list[str],
        typer.Argument(help="Schedules from the list below, CSV files, or [b]all[/b]."),
    ],
    request: ScheduleRequest,
    save: SavePictures = None,
) -> None:
    """Compare schedules by time, bubbles and memory, and with the best possible time.

    [dim]stageline simulate 1f1b zb_h1 zbv -p 8 -m 24 --forward 1.1 --transfer 0.05[/dim]

    [dim]stageline simulate 1f1b pipedream_2bw -p 8 -m 8 --num-minibatches 20[/dim]

    An option that only some of the schedules take is ignored for the others.
    A schedule that cannot be built is listed with the reason. [b]all[/b] includes
    the asynchronous schedules if --num-minibatches is given.
    """
    every_name = schedule_names(synchronous=None if request.num_minibatches else True)
    names = [n for name in schedules for n in (every_name if name == "all" else (name,))]
    if len(names) > 1:
        if save:
            raise ReportError(f"--save was given with {len(names)} schedules: give one schedule")
        _compare(names, request)
        return
    check_pictures(save or [])
    built, timeline = request.run(names[0])
    with saving(save or [], built, timeline):
        print_rich(_comparison([timeline]), "", _rank_table(timeline))


def _compare(names: Sequence[str], request: ScheduleRequest) -> None:
    """Print a row for each schedule that can be built; raise `ScheduleError` if none can."""
    taken = {name: FAMILIES[name].options for name in names if name in FAMILIES}
    for option in request.options:
        if not any(option in options for options in taken.values()):
            raise ScheduleError(f"{option} was given, but none of {', '.join(names)} takes it")
    if set(names) & set(schedule_names(synchronous=False)):  # the same work for all
        count = request.num_minibatches or COMPARED_MINIBATCHES
        request = replace(request, num_minibatches=count)
    timelines, failures = [], []
    for name in names:
        options = {o: v for o, v in request.options.items() if o in taken.get(name, ())}
        try:
            timelines.append(replace(request, options=options).run(name)[1])
        except StagelineError as error:
            failures.append(f"{name}: {error}")
    if not timelines:
        raise ScheduleError("none of the schedules can be built\n" + "\n".join(failures))
    print_rich(_comparison(timelines))
    for failure in failures:
        typer.echo(failure, err=True)


def _comparison(timelines: Sequence[Timeline]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("schedule")
    columns = ["makespan", "lower bound", "step bubble", "span bubble", "peak activations"]
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
