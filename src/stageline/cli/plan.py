"""`stageline plan`: find the fastest way to train a model on a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from stageline.cli.models.profile import measure_profile
from stageline.cli.options import DeviceMemory, Jobs, SaveFile
from stageline.cli.output import check_file, loading_torch, print_grid, print_written
from stageline.errors import PlanError

if TYPE_CHECKING:
    from stageline import Cluster, Plan, Profile


ClusterFile = Annotated[
    Path | None,
    typer.Option(help="Cluster as a JSON file, instead of --num-devices and --memory."),
]
Optimizer = Annotated[str, typer.Option(help="sgd, momentum, adagrad, adam or adamw.")]
Schedules = Annotated[
    list[str] | None, typer.Option("--schedule", help="Schedule to consider; repeatable.")
]


def plan(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="MODULE:FUNCTION, or a profile as a JSON file.")
    ],
    batch_size: Annotated[int, typer.Option(help="Samples per step, over all replicas.")],
    num_devices: Annotated[int | None, typer.Option(help="Number of identical devices.")] = None,
    memory: DeviceMemory = None,
    cluster: ClusterFile = None,
    optimizer: Optimizer = "adamw",
    schedules: Schedules = None,
    jobs: Jobs = 1,
    save: SaveFile = Path("plan.json"),
) -> None:
    """Find the fastest way to train your model within the memory of the devices.

    [dim]stageline plan my_model:build --num-devices 8 --memory 22GiB --batch-size 512[/dim]

    [dim]stageline plan profile.json --num-devices 4 --memory 22GiB --batch-size 96
    --schedule 1f1b --schedule pipedream[/dim]

    By default all synchronous schedules are considered. Asynchronous schedules,
    which may replicate single stages, are considered if they are named.

    Prints the best plans with the expected times and memory, and the timeline of
    the first. [b]sl.Pipeline(model, loss_fn, plan=sl.Plan.load("plan.json"))[/b]
    trains with it.
    """
    if cluster is None and (num_devices is None or memory is None):
        raise PlanError(
            "no cluster was given: give --num-devices and --memory, or a file with --cluster"
        )
    check_file(save)
    with loading_torch():
        from stageline import Cluster, Profile  # noqa: PLC0415
    devices = Cluster.load(cluster) if cluster else Cluster(num_devices or 0, memory)
    is_file = model.endswith(".json")
    costs = Profile.load(model) if is_file else measure_profile(model, jobs)
    options = {"schedules": schedules} if schedules else {}
    found = _search(costs, devices, batch_size=batch_size, optimizer=optimizer, **options)
    found.save(save)
    typer.echo(f"{found}\n")
    print_grid(found.timeline)
    print_written(save)


def _search(profile: Profile, cluster: Cluster, **options: Any) -> Plan:
    """Search for a plan, with a status line that shows how many were tried."""
    from stageline import plan as search  # noqa: PLC0415  imports torch

    with Console(stderr=True).status("planning") as status:
        return search(
            profile,
            cluster,
            progress=lambda count, words: status.update(f"planning: {count} tried, {words}"),
            **options,
        )
