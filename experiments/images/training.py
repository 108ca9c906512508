"""Train an AmoebaNet on four partitions with recomputation, from scratch or from other weights."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

import stageline as sl
from experiments.images.batches import Batches, subset
from experiments.images.data import TASKS, Images, load
from experiments.images.recipe import Recipe
from stageline.zoo import amoebanet

CELLS = {"B": amoebanet.B, "D": amoebanet.D}
HEADS = ("head.", "auxiliary.")  # what a new task does not take over
NUM_PARTITIONS = 4
WEIGHTS = "weights.safetensors"
MAX_UNSAVED = 25  # steps: a kill costs at most about five seconds


@dataclass(frozen=True)
class Training:
    """One run: the same value trained again gives the same bits."""

    task: str
    cells: str
    num_layers: int
    num_filters: int
    recipe: Recipe
    seed: int = 0
    share: float = 1.0  # of the task's images to train on
    source: Training | None = None  # whose weights it begins with, except those of the heads

    @property
    def name(self) -> str:
        """Return a name for results and folders.

        >>> source = Training("fashion", "B", 3, 16, Recipe(steps=9))
        >>> Training("digits", "B", 3, 16, Recipe(steps=5), 2, 0.1, source).name
        'digits 10% from fashion B(3,16) 5 steps seed 2'
        """
        model = f"{self.cells}({self.num_layers},{self.num_filters})"
        origin = f"from {self.source.task} " if self.source else ""
        run = f"{self.recipe.steps} steps seed {self.seed}"
        return f"{self.task} {self.share:.0%} {origin}{model} {run}"

    @property
    def settings(self) -> str:
        """Return digits that change with anything about the run, also with what has no name."""
        return sha256(repr(self).encode()).hexdigest()[:8]

    def folder(self, runs: Path) -> Path:
        """Return where checkpoints are."""
        return runs / f"{self.name.replace(' ', '_').replace('%', '')}-{self.settings}"


def new_pipeline(run: Training, num_partitions: int = NUM_PARTITIONS) -> sl.Pipeline:
    """Return the untrained pipeline of a run, whose weights depend on the seed alone."""
    torch.manual_seed(run.seed)
    layers = amoebanet.amoebanet(
        CELLS[run.cells],
        len(TASKS[run.task].classes),
        run.num_layers,
        run.num_filters,
        stem="small",
        image_channels=1,
        has_auxiliary_head=True,
    )
    # A step of B(3,16) takes 199 ms of processor time instead of 265.
    layers.modules.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return sl.Pipeline(
        layers,
        run.recipe.loss,
        num_ranks=num_partitions,
        num_microbatches=run.recipe.num_microbatches,
        schedule="gpipe",
        recompute="always",
        example_inputs=load(run.task)[1].pixels[: run.recipe.batch_size],
        options=sl.Options(seed=run.seed),
    )


def fit(run: Training, pipe: sl.Pipeline, folder: Path) -> None:
    """Train a pipeline to the end of the run, from its last checkpoint if there is one."""
    images = subset(load(run.task)[0], run.share, run.seed)
    flips = TASKS[run.task].is_symmetric
    loader = Batches(images, run.recipe.batch_size, flips, run.recipe.cutout)
    optimizer, scheduler = run.recipe.optimizer(pipe.parameters())
    interval = max(1, min(MAX_UNSAVED, run.recipe.steps // 2))
    sl.fit(
        pipe,
        loader,
        optimizer,
        steps=run.recipe.steps,
        folder=folder,
        save_every=interval,
        keep=1,
        report_every=interval,
        scheduler=scheduler,
    )


def train(run: Training, runs: Path) -> dict[str, Any]:
    """Train and test; return what the tables need."""
    folder = run.folder(runs)
    with new_pipeline(run) as pipe:
        if run.source:
            take_over(pipe, source_weights(run.source, runs))
        fit(run, pipe, folder)
        sl.export(folder / WEIGHTS, pipe)
        train_images, test_images = load(run.task)
        return {
            "accuracy": accuracy(pipe, test_images),
            "parameters": sum(parameter.numel() for parameter in pipe.parameters()),
            "images": len(subset(train_images, run.share, run.seed).labels),
            "test images": len(test_images.labels),
            "weights": digest(pipe.state_dict()),
        }


def source_weights(source: Training, runs: Path) -> dict[str, Tensor]:
    """Return the weights of a run, which is made first if its folder is not there."""
    path = source.folder(runs) / WEIGHTS
    if not path.exists():
        train(source, runs)
    return load_file(path)


def take_over(pipe: sl.Pipeline, weights: dict[str, Tensor]) -> None:
    """Copy all weights and statistics but those of the heads, which stay random."""
    kept = {name: value for name, value in weights.items() if not name.startswith(HEADS)}
    expected = {name for name in pipe.state_dict() if not name.startswith(HEADS)}
    assert kept.keys() == expected  # or else some layer would silently stay random
    pipe.load_state_dict(kept, strict=False)


def accuracy(pipe: sl.Pipeline, images: Images, size: int = 500) -> float:
    """Return the share of images whose class has the highest logit of the head."""
    pipe.eval()
    correct = 0
    with torch.no_grad():
        for chosen in torch.arange(len(images.labels)).chunk(-(-len(images.labels) // size)):
            pixels, labels = images.at(chosen)
            logits, _ = pipe(pixels)
            correct += int((logits.argmax(dim=1) == labels).sum())
    pipe.train()
    return correct / len(images.labels)


def digest(state: dict[str, Tensor]) -> str:
    """Return 16 hexadecimal digits that change with any bit of a weight or a statistic."""
    found = sha256()
    for name, value in sorted(state.items()):
        found.update(name.encode() + value.contiguous().numpy().tobytes())
    return found.hexdigest()[:16]
