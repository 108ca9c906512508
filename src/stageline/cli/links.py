"""`stageline links`: measure the links between processes, and save them as a cluster."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from stageline.cli.options import DeviceMemory, NumProcesses, SaveFile
from stageline.cli.output import check_file, loading_torch, print_and_save
from stageline.errors import PlanError

TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # variables that torchrun sets


def links(
    num_processes: NumProcesses = 2,
    memory: DeviceMemory = None,
    device: Annotated[
        str | None,
        typer.Option(help="Kind of device, e.g. cuda: measure between those of the ranks."),
    ] = None,
    save: SaveFile = Path("cluster.json"),
) -> None:
    """Measure the latency and bandwidth of the links between processes.

    [dim]stageline links --num-processes 2[/dim]

    To measure the links between machines, run the command on each of them with torchrun:

    [dim]torchrun --nnodes 2 … -m stageline links --memory 22GiB[/dim]

    [b]stageline plan --cluster cluster.json[/b] reads the file.
    """
    check_file(save)
    if set(TORCHRUN) <= os.environ.keys():
        _measure(memory, device, save)
        return
    if num_processes < 2:
        raise PlanError(
            f"--num-processes is {num_processes}, but a link needs 2 processes: use "
            "--num-processes 2, or start this command with torchrun"
        )
    with loading_torch():
        from stageline import Device  # noqa: PLC0415
        from stageline.cli.launch import exit_on_signal, launch_module  # noqa: PLC0415
    options = ["--memory", str(Device(memory).memory_bytes)] if memory else []
    options += ["--device", device] if device else []
    with exit_on_signal():
        launch_module("stageline", ["links", "--save", str(save), *options], num_processes)


def _measure(memory: str | None, device: str | None, path: Path) -> None:
    """Measure links as one of several processes; the first one prints and saves the result."""
    own = f"{device}:{os.environ['LOCAL_RANK']}" if device and device != "cpu" else None
    is_first = os.environ["RANK"] == "0"
    console = Console(stderr=True, quiet=not is_first)
    with loading_torch(console):
        import torch.distributed as dist  # noqa: PLC0415

        from stageline import measure_links  # noqa: PLC0415
    with console.status("waiting for the other ranks"):
        dist.init_process_group("gloo")
    try:
        cluster = measure_links(device=own, memory=memory)
    finally:
        dist.destroy_process_group()
    if is_first:
        print_and_save(cluster, path)
