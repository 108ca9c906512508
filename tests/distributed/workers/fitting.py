"""Trains with sl.fit until it is done, however often it is started: folder, steps."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW
from torch.utils.data import DataLoader, TensorDataset

import stageline as sl
from stageline.zoo.gpt import Head, loss


def main() -> None:
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
    (folder / f"pid-{attempt}-{rank}").write_text(str(os.getpid()))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    embedding = nn.Embedding(11, 8)
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.LayerNorm(8)) for _ in range(3)]
    pipe = sl.Pipeline(
        nn.Sequential(embedding, *blocks, nn.BatchNorm1d(5), Head(embedding)),
        loss,
        num_ranks=dist.get_world_size(),
        num_microbatches=4,
        schedule="zb_h1",
    )
    tokens = torch.randint(0, 11, (90, 5))
    loader = DataLoader(TensorDataset(tokens, tokens.roll(1)), batch_size=8, shuffle=True)
    optimizer = AdamW(pipe.parameters(), 1e-2)
    sl.fit(pipe, loader, optimizer, steps=steps, folder=folder, save_every=20, max_norm=1.0)
    sl.export(folder / "model.safetensors", pipe)
    pipe.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
