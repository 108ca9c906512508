"""`stageline verify`: compare pipelines of a user's model with a plain loop, bit for bit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.markup import escape

import stageline as sl
from stageline.cli.models.reference import load_workload
from stageline.cli.options import NumMicrobatches, NumRanks, check_synchronous
from stageline.cli.output import loading_torch, print_rich
from stageline.errors import ParityError, ScheduleError
from stageline.schedules.build import schedule_names

if TYPE_CHECKING:
    from stageline.model.workload import Workload

WORDS = {True: "bit-identical", False: "[red]differs[/red]", None: "[dim]not possible[/dim]"}


class Verification(NamedTuple):
    """The result of comparing one schedule with a plain loop."""

    schedule: str
    is_equal: bool | None  # None if the schedule cannot be built for these sizes
    reason: str = ""


def verify(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FUNCTION",
            help="Returns model, loss_fn, inputs, target; or model and inputs.",
        ),
    ],
    schedules: Annotated[
        list[str] | None, typer.Argument(help="Schedules; by default all synchronous ones.")
    ] = None,
    num_ranks: NumRanks = 2,
    num_microbatches: NumMicrobatches = 4,
    recompute: Annotated[str, typer.Option(help="never, always or except_last.")] = "never",
    backend: Annotated[str, typer.Option(help="threads or serial.")] = "threads",
) -> None:
    """Check that pipelines of your model give the same bits as a plain training loop.

    [dim]stageline verify my_model:build 1f1b zbv -p 4 -m 8[/dim]

    All gradients, buffers and losses are compared. The function takes no
    arguments and returns a model for sl.Pipeline, its loss function, and the
    inputs and target of one mini-batch; or the model and its inputs alone, if
    it computes its own loss.
    """
    names = schedules or schedule_names(synchronous=True)
    check_synchronous(names)
    with loading_torch():
        import stageline.pipeline  # noqa: F401, PLC0415
    options = {"num_ranks": num_ranks, "num_microbatches": num_microbatches}
    results = []
    for result in verify_each(
        load_workload(model), names, **options, recompute=recompute, backend=backend
    ):
        reason = f"  [dim]{escape(result.reason)}[/dim]" if result.reason else ""
        print_rich(f"{result.schedule:<18} {WORDS[result.is_equal]}{reason}")
        results.append(result.is_equal)
    if False in results or not any(results):
        raise typer.Exit(1)


def verify_each(
    workload: Workload, schedules: Iterable[str], **options: Any
) -> Iterator[Verification]:
    """Verify one schedule after another; the model is left unchanged."""
    for name in schedules:
        try:
            pipe = sl.Pipeline(
                workload.model,
                workload.loss_fn,
                schedule=name,
                example_inputs=workload.inputs,
                **options,
            )
        except ScheduleError as error:
            yield Verification(name, None, str(error).splitlines()[0])
            continue
        try:
            pipe.verify(workload.inputs, workload.target)
            yield Verification(name, is_equal=True)
        except ParityError as error:
            yield Verification(name, is_equal=False, reason=str(error))
        finally:
            pipe.close()
