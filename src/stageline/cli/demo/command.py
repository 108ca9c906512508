"""The `stageline demo` command; torch is imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stageline.cli.options import NumRanks, check_synchronous
from stageline.cli.output import loading_torch, print_written


def demo(
    folder: Annotated[Path, typer.Argument(help="Folder for the files it writes.")] = Path("demo"),
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 320,
    num_ranks: NumRanks = 4,
    schedule: Annotated[
        str, typer.Option(help="A schedule from [b]stageline draw --help[/b].")
    ] = "1f1b",
) -> None:
    """Train a small GPT, compare it with a plain loop bit for bit, and draw the measured timeline.

    [dim]stageline demo --steps 100 --schedule zb_h1[/dim]

    Writes [b]demo.svg[/b], [b]gpt.safetensors[/b] and [b]sample.txt[/b]. Ctrl-C ends
    the training early and continues with the rest.
    """
    check_synchronous([schedule])
    with loading_torch():
        from stageline.cli.demo.training import run  # noqa: PLC0415
    for path in run(folder, steps=steps, num_ranks=num_ranks, schedule=schedule):
        print_written(path)
