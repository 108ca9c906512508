"""Train a transformers model in a loop of your own, in one process or in several.

python examples/bare_loop.py
stageline run --num-processes 2 examples/bare_loop.py
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import stageline as sl
from stageline.zoo.text import VOCABULARY, standard_library, tokens

CONTEXT = 32
WARMUP = 4


def language_model() -> LlamaForCausalLM:
    """Return a tiny Llama with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
    )
    return LlamaForCausalLM(config)


def batches(size: int = 8) -> Iterator[dict[str, Tensor]]:
    """Yield batches of Python's standard library; a causal LM shifts its labels itself."""
    text = tokens(standard_library()).long()
    for first in range(0, len(text) - size * CONTEXT, size * CONTEXT):
        passages = text[first : first + size * CONTEXT].view(size, CONTEXT)
        yield {"input_ids": passages, "labels": passages}


def evaluate(pipe: sl.Pipeline, batch: dict[str, Tensor]) -> float:
    """Return the loss of a batch in evaluation: outputs come from the pipeline, without a graph."""
    pipe.eval()
    logits = pipe({"input_ids": batch["input_ids"]}).logits
    pipe.train()
    return float(torch.nn.functional.cross_entropy(logits[:, :-1].mT, batch["labels"][:, 1:]))


def train(
    num_ranks: int = 2, steps: int = 6, folder: Path | None = None, show: bool = True
) -> list[float]:
    """Train up to a number of steps, from the last checkpoint in the folder; return the losses."""
    held_out, *data = [batch for batch, _ in zip(batches(), range(steps + 1), strict=False)]
    pipe = sl.Pipeline(
        language_model(), example_inputs=held_out, num_ranks=num_ranks, num_microbatches=4
    )
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / WARMUP))
    done = 0
    if folder is not None and sl.latest(folder):
        done, state = sl.load(folder, pipe, optimizer)
        scheduler.load_state_dict(state)
    losses = []
    for step, batch in enumerate(data[done:], done + 1):
        losses.append(float(pipe.step(batch).loss))
        pipe.clip_grad_norm_(1.0)  # of all ranks; torch's own sees this process's gradients only
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if show:
            print(f"step {step}   loss {losses[-1]!r}")
    held_out_loss = evaluate(pipe, held_out)
    if show:
        print(f"held out   loss {held_out_loss!r}")
    if folder is not None:
        sl.save(folder, pipe, optimizer, step=steps, data=scheduler.state_dict())
    pipe.close()
    return losses


def main(
    num_ranks: Annotated[int, typer.Option(help="Ranks, if there is only one process.")] = 2,
    steps: Annotated[int, typer.Option(help="Total number of optimizer steps.")] = 6,
    folder: Annotated[Path | None, typer.Option(help="For checkpoints.")] = None,
) -> None:
    """Train a tiny Llama on Python's standard library."""
    is_launched = "RANK" in os.environ
    if is_launched:
        dist.init_process_group()
    torch.set_num_threads(1)
    ranks = dist.get_world_size() if is_launched else num_ranks
    train(ranks, steps, folder, show=not is_launched or dist.get_rank() == 0)
    if is_launched:
        dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
