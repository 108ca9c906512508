"""`stageline verify`: compare pipelines of a user's model with a plain loop, bit for bit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.markup import escape

import stageline as sl
from stageline.cli.models.reference import load_workload
from stageline.cli.options import NumMicrobatches, NumRanks, check_synchronous
from stageline.cli.output import loading_torch, print_rich
from stageline.errors import (
    HostWaitError,
    ParityError,
    ScheduleError,
    StageError,
    StreamOrderError,
)
from stageline.schedules.build import schedule_names

if TYPE_CHECKING:
    from stageline.model.workload import Workload


class Outcome(Enum):
    """What became of a schedule."""

    EQUAL = "bit-identical"
    DIFFERENT = "[red]differs[/red]"
    UNORDERED = "[red]fails[/red]"  # its streams are in no certain order
    IMPOSSIBLE = "[dim]not possible[/dim]"  # for these sizes


class Verification(NamedTuple):
    """The result of comparing one schedule with a plain loop."""

    schedule: str
    outcome: Outcome
    details: str = ""


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
    recompute: Annotated[
        str, typer.Option(help="never, always, except_last or selective.")
    ] = "never",
    backend: Annotated[str, typer.Option(help="threads or serial.")] = "threads",
    streams: Annotated[
        bool, typer.Option("--streams", help="Simulate devices, and check their streams.")
    ] = False,
) -> None:
    """Check that pipelines of your model give the same bits as a plain training loop.

    [dim]stageline verify my_model:build 1f1b zbv -p 4 -m 8[/dim]

    All gradients, buffers and losses are compared. The function takes no
    arguments and returns a model for sl.Pipeline, its loss function, and the
    inputs and target of one mini-batch; or the model and its inputs alone, if
    it computes its own loss.

    With --streams each rank is a simulated device, whose work is queued on
    streams. Two uses of the same memory that no event orders are an error,
    and so is a host that waits for a device.
    """
    names = schedules or schedule_names(synchronous=True)
    check_synchronous(names)
    with loading_torch():
        import stageline.pipeline  # noqa: F401, PLC0415
    sizes = {"num_ranks": num_ranks, "num_microbatches": num_microbatches}
    options: dict[str, Any] = {"recompute": recompute, "backend": backend}
    if streams:
        options["options"] = sl.Options(check_streams=True)
    outcomes = set()
    for result in verify_each(load_workload(model), names, **sizes, **options):
        details = f"  [dim]{escape(result.details)}[/dim]" if result.details else ""
        print_rich(f"{result.schedule:<18} {result.outcome.value}{details}")
        outcomes.add(result.outcome)
    if not outcomes & {Outcome.EQUAL} or outcomes & {Outcome.DIFFERENT, Outcome.UNORDERED}:
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
            yield Verification(name, Outcome.IMPOSSIBLE, str(error).splitlines()[0])
            continue
        try:
            pipe.verify(workload.inputs, workload.target)
            yield Verification(name, Outcome.EQUAL, _checked(pipe))
        except ParityError as error:
            yield Verification(name, Outcome.DIFFERENT, str(error))
        except StageError as error:
            if not isinstance(error.__cause__, StreamOrderError | HostWaitError):
                raise
            yield Verification(name, Outcome.UNORDERED, str(error))
        finally:
            pipe.close()


def _checked(pipe: sl.Pipeline) -> str:
    """Return how much a check of streams has seen, or nothing if there was none."""
    from stageline.pipeline import session_of  # noqa: PLC0415
    from stageline.runtime.devices import stream_check  # noqa: PLC0415

    found = stream_check(session_of(pipe).assembly.layout.accelerators)
    return f"streams: {found}" if found.num_accesses else ""
