"""`stageline draw`: one schedule as a grid in the terminal, or as a picture in a file."""

from __future__ import annotations

from typing import Annotated

import typer

from stageline.cli.options import SavePictures, ScheduleRequest, with_schedule_options
from stageline.cli.output import check_pictures, print_grid, saving


@with_schedule_options
def draw(
    schedule: Annotated[str, typer.Argument(help="A schedule from the list below or a CSV file.")],
    request: ScheduleRequest,
    save: SavePictures = None,
) -> None:
    """Draw a schedule as a grid of ranks over time, and save it as a picture or CSV file.

    [dim]stageline draw zbv -p 8 -m 24 --weight-grad 0.6 --save zbv.svg --save zbv.csv[/dim]

    [dim]stageline draw pipedream -p 4 -m 1 --num-minibatches 8[/dim]
    """
    check_pictures(save or [])
    built, timeline = request.run(schedule)
    with saving(save or [], built, timeline):
        print_grid(timeline)
