"""Measure what recording costs: a step through a pipeline of one rank, over a plain loop.

    python -m benchmarks.models.replay_cost

Both run the same micro-batches of the same model, in turns, so that whatever else the machine does
affects both. The median of the ratios counts.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from statistics import median, quantiles
from time import perf_counter
from typing import Annotated, Any

import torch
import transformers
import typer
from benchmarks.models.case import noise, tokens
from rich.progress import track
from torch import nn

import stageline as sl

NUM_MICROBATCHES, NUM_SAMPLES = 4, 8


def llama() -> tuple[nn.Module, dict[str, Any]]:
    """Return a Llama with 4 blocks of width 256, and 64 tokens a sample."""
    config = transformers.LlamaConfig(
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
    )
    ids = tokens(NUM_SAMPLES, 64, 1000)
    return transformers.LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}


def vit() -> tuple[nn.Module, dict[str, Any]]:
    """Return a ViT with 4 blocks of width 256, and 65 patches an image."""
    config = transformers.ViTConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        image_size=64,
        patch_size=8,
        num_labels=10,
    )
    labels = tokens(NUM_SAMPLES, 1)[:, 0] % 10
    batch = {"pixel_values": noise(NUM_SAMPLES, 3, 64, 64), "labels": labels}
    return transformers.ViTForImageClassification(config), batch


def main(
    rounds: Annotated[int, typer.Option(help="Pairs of steps to measure.")] = 40,
    threads: Annotated[int, typer.Option(help="Threads of torch.")] = 1,
) -> None:
    """Print the median ratio of a step through the pipeline to one of the plain loop."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(threads)
    for build in (llama, vit):
        torch.manual_seed(0)
        model, batch = build()
        ratios, plain = measure(model, batch, rounds)
        low, _, high = quantiles(ratios, n=4)
        print(
            f"{type(model).__name__}: {median(ratios):.3f} of a plain loop "
            f"({low:.3f} to {high:.3f}), "
            f"which takes {1e3 * median(plain):.1f} ms"
        )


def measure(
    model: nn.Module, batch: dict[str, Any], rounds: int
) -> tuple[list[float], list[float]]:
    """Return the ratios, and the times of the plain loop."""
    size = NUM_SAMPLES // NUM_MICROBATCHES
    parts = [
        {name: tensor[first : first + size] for name, tensor in batch.items()}
        for first in range(0, NUM_SAMPLES, size)
    ]

    def loop() -> None:
        for part in parts:
            (model(**part).loss / NUM_MICROBATCHES).backward()

    with sl.Pipeline(
        model,
        example_inputs=batch,
        num_ranks=1,
        num_microbatches=NUM_MICROBATCHES,
        backend="serial",
    ) as pipe:

        def step() -> None:
            pipe.step(batch)

        for warm_up in (loop, step) * 3:
            timed(model, warm_up)
        pairs = [(timed(model, loop), timed(model, step)) for _ in track(range(rounds), "rounds")]
    return [step / loop for loop, step in pairs], [loop for loop, _ in pairs]


def timed(model: nn.Module, work: Callable[[], None]) -> float:
    """Return the seconds of a step that begins without gradients."""
    model.zero_grad()
    start = perf_counter()
    work()
    return perf_counter() - start


if __name__ == "__main__":
    typer.run(main)
