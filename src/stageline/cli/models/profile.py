"""`stageline profile`: measure what each layer of a user's model costs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stageline.cli.models.reference import load_workload
from stageline.cli.options import Jobs, SaveFile
from stageline.cli.output import check_file, loading_torch, print_and_save

if TYPE_CHECKING:
    from stageline import Profile


def profile(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FUNCTION",
            help="Returns model, loss_fn, inputs, target; or model and inputs.",
        ),
    ],
    jobs: Jobs = 1,
    save: SaveFile = Path("profile.json"),
) -> None:
    """Measure the time and memory that each layer of your model takes.

    [dim]stageline profile my_model:build --jobs 2 --save profile.json[/dim]

    [b]stageline plan profile.json[/b] reads the file.
    """
    check_file(save)
    print_and_save(measure_profile(model, jobs), save)


def measure_profile(model: str, jobs: int) -> Profile:
    """Return the profile of the model that `module:function` makes."""
    with loading_torch():
        from stageline import profile as measure  # noqa: PLC0415
    workload = load_workload(model)
    return measure(
        workload.model,
        workload.inputs,
        loss_fn=workload.loss_fn,
        target=workload.target,
        ranks=jobs,
    )
