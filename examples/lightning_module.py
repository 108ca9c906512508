"""Train a LightningModule whose model runs in a pipeline, in one process or in several.

python examples/lightning_module.py
stageline run --num-processes 2 examples/lightning_module.py
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from lightning import Trainer
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

import stageline as sl
from stageline.integrations.lightning import PipelineModule


class Residual(nn.Module):
    """A classifier of vectors, with a skip around every block."""

    def __init__(self, width: int = 32, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())
            for _ in range(blocks)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        logits: Tensor = self.head(x)
        return logits


class Classifier(PipelineModule):
    """Trains with `pipe.step`, and validates with the pipeline's outputs."""

    def __init__(self, pipe: sl.Pipeline, is_first: bool) -> None:
        super().__init__(pipe)
        self.is_first = is_first
        self.losses: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.losses.append(float(self.pipe.step(*batch).loss))
        self.pipe.clip_grad_norm_(1.0)  # of all ranks
        optimizer.step()
        scheduler: Any = self.lr_schedulers()
        scheduler.step()
        if self.is_first:
            print(f"step {len(self.losses)}   loss {self.losses[-1]!r}")

    def validation_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
        loss = nn.functional.cross_entropy(self.pipe(batch[0]), batch[1])
        self.log("val_loss", loss)
        if self.is_first:
            print(f"validation   loss {float(loss)!r}")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.pipe.parameters(), lr=1e-2)
        return [optimizer], [CosineAnnealingLR(optimizer, T_max=8)]


def loader(seed: int, num_samples: int) -> DataLoader[tuple[Tensor, ...]]:
    """Return random vectors, and as class the index of the largest of ten of their elements."""
    inputs = torch.randn(num_samples, 32, generator=torch.Generator().manual_seed(seed))
    return DataLoader(TensorDataset(inputs, inputs[:, :10].argmax(dim=1)), batch_size=32)


def model() -> Residual:
    torch.manual_seed(0)
    return Residual()


def train(num_ranks: int, folder: Path | None, is_first: bool = True) -> list[float]:
    """Train for two epochs; return the losses."""
    pipe = sl.Pipeline(
        model(),
        nn.functional.cross_entropy,
        example_inputs=torch.zeros(32, 32),
        num_ranks=num_ranks,
        num_microbatches=4,
    )
    module = Classifier(pipe, is_first)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,  # for Lightning, also where the pipeline has several processes
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader(0, 128), loader(1, 32))
    if folder is not None:
        optimizer: Any = module.optimizers(use_pl_optimizer=False)
        sl.save(folder, pipe, optimizer, step=len(module.losses))
    pipe.close()
    return module.losses


def main(
    num_ranks: Annotated[int, typer.Option(help="Ranks, if there is only one process.")] = 2,
    folder: Annotated[Path | None, typer.Option(help="For a checkpoint.")] = None,
) -> None:
    """Train a small classifier of random vectors."""
    is_launched = "RANK" in os.environ
    if is_launched:
        dist.init_process_group()
    torch.set_num_threads(1)
    ranks = dist.get_world_size() if is_launched else num_ranks
    train(ranks, folder, is_first=not is_launched or dist.get_rank() == 0)
    if is_launched:
        dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
