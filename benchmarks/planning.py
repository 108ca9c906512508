"""How long planning takes, on paper: no such machines are needed, and no weights are made.

    python benchmarks/planning.py
    python benchmarks/planning.py --picture docs/pictures/thousand.svg

A Transformer of 1,000 layers on 64 devices, and one of 412 on 1,024 devices over three levels of
links: 8 to a machine, 16 machines to a site, 8 sites.
"""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import Annotated

import torch
import typer
from rich.console import Console

import stageline as sl
from stageline.planning.cluster.cluster import Level
from stageline.planning.profiling.repeat_layers import repeat_layers
from stageline.zoo.gpt import loss
from stageline.zoo.transformer import transformer

RATES = {"flops": 150e12, "bandwidth": 1.5e12}  # half of what an A100's data sheet says
MACHINE = Level("machine", 8, bandwidth=300e9, latency=2e-6)
SITE = Level("site", 16, bandwidth=25e9, latency=1e-5)
WORLD = Level("world", 8, bandwidth=1e9, latency=1e-2)


def profile_of(num_layers: int, width: int) -> sl.Profile:
    """From one layer, many times over."""
    with torch.device("meta"):
        layers = transformer(num_layers=1, width=width, heads=32)
        tokens = torch.empty(1, 1024, dtype=torch.long)
    shallow = sl.estimate(layers, tokens, **RATES, loss_fn=loss, target=tokens, sizes=(1, 2, 4))
    return repeat_layers(shallow, (1, num_layers, 1))


def planned(name: str, profile: sl.Profile, cluster: sl.Cluster, batch_size: int) -> sl.Plan:
    console = Console(width=140)
    start = perf_counter()
    with console.status("planning") as status:
        plan = sl.plan(
            profile,
            cluster,
            batch_size=batch_size,
            progress=lambda count, words: status.update(f"{name}: {count} tried, {words}"),
        )
    console.print(f"{name}: planned in {perf_counter() - start:.1f} s", highlight=False)
    for option in (plan.chosen, *plan.others[:3]):
        console.print(
            f"  {option.description}: {option.seconds:.3f} s a step, {option.verdict}",
            highlight=False,
        )
    return plan


def main(
    picture: Annotated[Path | None, typer.Option(help="Draw the larger plan there.")] = None,
) -> None:
    """Print how long planning takes, and the plans."""
    machines = Level("site", 8, bandwidth=25e9, latency=1e-5)
    cluster = sl.Cluster(num_devices=64, memory="80GB", levels=(MACHINE, machines))
    planned("1,000 layers on 64 devices", profile_of(998, 1024), cluster, 512)
    world = sl.Cluster(num_devices=1024, memory="80GB", levels=(MACHINE, SITE, WORLD))
    plan = planned("412 layers on 1,024 devices", profile_of(410, 4096), world, 4096)
    if picture is not None:
        plan.timeline.save(picture)


if __name__ == "__main__":
    typer.run(main)
