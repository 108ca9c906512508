"""Train a transformers model with accelerate's Accelerator, in one process or in several.

python examples/accelerate_loop.py
stageline run --num-processes 2 examples/accelerate_loop.py
"""

from __future__ import annotations

import os
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification

import stageline as sl
from stageline.integrations.accelerate import PipelineAccelerator

VOCABULARY, LENGTH, WARMUP = 50, 16, 4


def classifier() -> BertForSequenceClassification:
    """Return a tiny BERT with random weights."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForSequenceClassification(config)


def samples(count: int = 48) -> list[dict[str, Tensor]]:
    """Return random tokens; the label is whether the first is one of the upper half."""
    ids = torch.randint(VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(0))
    labels = (ids[:, 0] >= VOCABULARY // 2).long()
    return [{"input_ids": row, "labels": label} for row, label in zip(ids, labels, strict=True)]


def train(num_ranks: int = 2) -> list[float]:
    """Train for one epoch; return the losses."""
    loader: DataLoader[Any] = DataLoader(samples(), batch_size=8)  # type: ignore[arg-type]  # a list
    pipe = sl.Pipeline(
        classifier(), example_inputs=next(iter(loader)), num_ranks=num_ranks, num_microbatches=4
    )
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / WARMUP))
    accelerator = PipelineAccelerator(pipe, cpu=True)
    # never the model: the pipeline has it
    batches, optimizer, scheduler = accelerator.prepare(loader, optimizer, scheduler)
    losses = []
    for step, batch in enumerate(batches, 1):
        losses.append(float(pipe.step(batch).loss))
        accelerator.clip_grad_norm_(pipe.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        accelerator.print(f"step {step}   loss {losses[-1]!r}")
    pipe.close()
    return losses


def main(
    num_ranks: Annotated[int, typer.Option(help="Ranks, if there is only one process.")] = 2,
) -> None:
    """Train a tiny BERT on random tokens."""
    is_launched = "RANK" in os.environ
    if is_launched:
        dist.init_process_group()
    torch.set_num_threads(1)
    train(dist.get_world_size() if is_launched else num_ranks)
    if is_launched:
        dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
