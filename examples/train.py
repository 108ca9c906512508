"""Train a small GPT on Python source, in one process or in several, with the same script.

python examples/train.py --num-ranks 2
stageline run --num-processes 2 examples/train.py --folder run
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from torch.utils.data import DataLoader, TensorDataset

import stageline as sl
from stageline.zoo.gpt import gpt, loss
from stageline.zoo.text import VOCABULARY, standard_library, tokens

CONTEXT = 64


def sequences(count: int = 2000) -> TensorDataset:
    """Return sequences of tokens, and as target each sequence shifted by one token."""
    text = tokens(standard_library())[: count * CONTEXT + 1].long()
    return TensorDataset(text[:-1].view(-1, CONTEXT), text[1:].view(-1, CONTEXT))


def main(
    num_ranks: Annotated[int, typer.Option(help="Ranks, if there is only one process.")] = 2,
    steps: Annotated[int, typer.Option(help="Total number of optimizer steps.")] = 100,
    schedule: Annotated[str, typer.Option(help="A name from `stageline draw --help`.")] = "1f1b",
    folder: Annotated[Path | None, typer.Option(help="For checkpoints and metrics.")] = None,
) -> None:
    """Train, and resume from the checkpoint in the folder if there is one."""
    is_launched = "RANK" in os.environ
    if is_launched:
        dist.init_process_group()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    pipe = sl.Pipeline(
        gpt(vocabulary=VOCABULARY, width=64, heads=4, blocks=4, context=CONTEXT, dropout=0.1),
        loss,
        num_ranks=dist.get_world_size() if is_launched else num_ranks,
        num_microbatches=8,
        schedule=schedule,
    )
    optimizer = torch.optim.AdamW(pipe.parameters(), 3e-3)
    loader = DataLoader(sequences(), batch_size=32, shuffle=True)
    sl.fit(pipe, loader, optimizer, steps=steps, folder=folder, save_every=20, max_norm=1.0)
    if folder is not None:
        sl.export(folder / "model.safetensors", pipe)
    pipe.close()
    if is_launched:
        dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
