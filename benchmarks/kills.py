"""SIGKILL at random points: training ends with the bits of an undisturbed run.

    python benchmarks/kills.py                        200 kills, some minutes
    python benchmarks/kills.py --torchrun --kills 20  processes that torchrun starts again

Processes are killed when they connect, load, train or save, and started again by forks. After each
kill the newest checkpoint is at least as new as before.
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import torch
import typer
from rich.progress import track
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.distributed.fork_servers import fork_servers
from tests.distributed.kills import (
    newest_step,
    train_through,
    train_through_forks,
    train_undisturbed,
)


def main(
    kills: Annotated[int, typer.Option(help="How often a process is killed.")] = 200,
    ranks: Annotated[int, typer.Option(help="Processes.")] = 2,
    torchrun: Annotated[bool, typer.Option(help="Let torchrun start them again.")] = False,
    steps: Annotated[int, typer.Option(help="Steps to train in all, with torchrun.")] = 3000,
    longest: Annotated[float, typer.Option(help="Seconds until a kill, at most.")] = 4.0,
    seed: Annotated[int, typer.Option(help="Of the moments and ranks.")] = 0,
) -> None:
    """Train once disturbed and once not, and compare."""
    with fork_servers(), TemporaryDirectory() as name:
        disturbed, calm = Path(name) / "disturbed", Path(name) / "calm"
        lost = forward = 0
        if torchrun:
            for _ in track(
                train_through(disturbed, steps, kills=kills, num_ranks=ranks, seed=seed),
                total=kills,
            ):
                pass
            for _ in train_through(calm, steps, kills=0, num_ranks=ranks):
                pass
        else:
            run = train_through_forks(
                disturbed, kills=kills, num_ranks=ranks, longest=longest, seed=seed
            )
            before = 0
            for newest in track(run, "killing", total=kills):
                lost += newest < before
                forward += newest > before
                before = newest
            steps = newest_step(disturbed)
            train_undisturbed(calm, steps, ranks)
        found, wanted = (load_file(folder / "model.safetensors") for folder in (disturbed, calm))
        differing = [name for name in wanted if not torch.equal(found[name], wanted[name])]
    print(f"{kills} kills in {steps} steps on {ranks} ranks; {lost} checkpoints were lost")
    if not torchrun:
        print(f"a new checkpoint came between {forward} of {kills} kills")
    print(f"{len(wanted) - len(differing)} of {len(wanted)} tensors equal to an undisturbed run")
    raise SystemExit(bool(differing) or bool(lost))


if __name__ == "__main__":
    typer.run(main)
