"""`stageline show`: the layers of a user's model, and how a pipeline would cut it."""

from __future__ import annotations

from typing import Annotated

import typer

import stageline as sl
from stageline.cli.models.reference import load_workload
from stageline.cli.options import NumMicrobatches, NumRanks
from stageline.cli.output import loading_torch


def show(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FUNCTION",
            help="Returns model, loss_fn, inputs, target; or model and inputs.",
        ),
    ],
    num_ranks: NumRanks = 2,
    num_microbatches: NumMicrobatches = 4,
    schedule: Annotated[str, typer.Option(help="The schedule's name.")] = "1f1b",
    opaque: Annotated[
        list[str] | None, typer.Option(help="A module that is never cut; repeatable.")
    ] = None,
    cut_at: Annotated[
        list[str] | None, typer.Option(help="A layer that a stage begins with; repeatable.")
    ] = None,
) -> None:
    """Show the layers of your model, what passes between stages, and where it is cut.

    [dim]stageline show my_model:build -p 4 -m 8 --cut-at model.layers.8[/dim]

    The function takes no arguments. Nothing is trained, and the model may be
    on the meta device.
    """
    with loading_torch():
        import stageline.pipeline  # noqa: F401, PLC0415
    workload = load_workload(model)
    with sl.Pipeline(
        workload.model,
        workload.loss_fn,
        example_inputs=workload.inputs,
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        schedule=schedule,
        backend="serial",
        init_fn=_leave,
        options=sl.Options(opaque=opaque or (), cut_at=cut_at or ()),
    ) as pipe:
        typer.echo(str(pipe))


def _leave(_: object) -> None:
    """Initialize nothing: the weights of a model on the meta device are not needed here."""
