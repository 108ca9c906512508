"""SIGKILL at random points under torchrun: training ends with the bits of an undisturbed run.

python benchmarks/kills.py              20 kills, some minutes
python benchmarks/kills.py --kills 3
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import torch
import typer
from rich.progress import track
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.distributed.kills import train_through


def main(
    kills: Annotated[int, typer.Option(help="How often a process is killed.")] = 20,
    steps: Annotated[int, typer.Option(help="Steps to train in all.")] = 3000,
    seed: Annotated[int, typer.Option(help="Of the moments and ranks.")] = 0,
) -> None:
    """Train once disturbed and once not, and compare."""
    with TemporaryDirectory() as name:
        disturbed, calm = Path(name) / "disturbed", Path(name) / "calm"
        killed: Counter[int] = Counter()
        run = train_through(disturbed, steps, kills=kills, seed=seed)
        for rank, _ in track(run, "killing", total=kills):
            killed[rank] += 1
        for _ in train_through(calm, steps, kills=0):
            pass
        found, wanted = (load_file(folder / "model.safetensors") for folder in (disturbed, calm))
        differing = [name for name in wanted if not torch.equal(found[name], wanted[name])]
    print(f"{kills} kills ({', '.join(f'rank {r}: {n}' for r, n in sorted(killed.items()))})")
    print(f"{len(wanted) - len(differing)} of {len(wanted)} tensors equal to an undisturbed run")
    raise SystemExit(bool(differing))


if __name__ == "__main__":
    typer.run(main)
