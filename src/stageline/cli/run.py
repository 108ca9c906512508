"""`stageline run`: start a script as several processes on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stageline.cli.options import NumProcesses
from stageline.cli.output import loading_torch


def run(
    context: typer.Context,
    script: Annotated[
        Path, typer.Argument(help="A Python script; the arguments after it are passed to it.")
    ],
    num_processes: NumProcesses = 2,
    max_restarts: Annotated[
        int, typer.Option(help="How often to start all processes again after a failure.")
    ] = 0,
    bind_cores: Annotated[
        bool,
        typer.Option(
            "--bind-cores/--no-bind-cores",
            help="Give each process its share of the cores, if there is one for each.",
        ),
    ] = True,
) -> None:
    """Run a script as several processes on this machine: torchrun, on loopback only.

    [dim]stageline run --num-processes 4 train.py --lr 0.1[/dim]

    The script calls torch.distributed.init_process_group(). With torchrun, the
    same script runs on several machines.
    """
    with loading_torch():
        from stageline.cli.launch import exit_on_signal, launch  # noqa: PLC0415
    with exit_on_signal():
        launch(script, context.args, num_processes, max_restarts, bind_cores=bind_cores)
