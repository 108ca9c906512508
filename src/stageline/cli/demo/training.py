"""The demo: train a small GPT on Python source, verify it, draw its timelines and sample from it.

    train ─► verify ─► predicted and measured timelines ─► checkpoint ─► sample of generated text

The sizes are chosen so that two cores take little more than a minute.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from rich.console import Console
from torch import Tensor

from stageline.checkpoint.export import export
from stageline.model.layers import LayerSequence
from stageline.pipeline import Pipeline, session_of
from stageline.report.summary import percent
from stageline.report.svg.drawing import stacked
from stageline.report.text.grid import plain
from stageline.report.text.terminal import coloured
from stageline.report.timeline import Timeline
from stageline.schedules.schedule import Schedule
from stageline.simulation.median_costs import median_costs, median_timeline
from stageline.simulation.simulate import simulate
from stageline.training.progress import progress
from stageline.zoo.gpt import generate, gpt, loss
from stageline.zoo.text import VOCABULARY, batch, characters, standard_library, tokens

BATCH_SIZE, NUM_MICROBATCHES, CONTEXT = 32, 8, 64
LEARNING_RATE, WARMUP_STEPS = 4e-3, 20
NUM_RECENT = 20  # steps whose timelines are kept
PROMPT, SAMPLE_LENGTH, TEMPERATURE = "def ", 500, 0.8
WIDTH = 100  # columns, if standard output is not a terminal


@dataclass(frozen=True)
class TrainingLog:
    """The losses of all steps so far, and the timelines of the last ones."""

    losses: list[float] = field(default_factory=list)
    timelines: deque[Timeline] = field(default_factory=lambda: deque(maxlen=NUM_RECENT))

    @property
    def bubble(self) -> float:
        return median(timeline.step_bubble for timeline in self.timelines)


def run(folder: Path, *, steps: int, num_ranks: int, schedule: str) -> list[Path]:
    """Run the whole demo, and return the files that it wrote."""
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False, markup=False)
    files = [folder / name for name in ("demo.svg", "gpt.safetensors", "sample.txt")]
    with _one_thread_per_rank():
        text = tokens(standard_library())
        with closing(_pipeline(text, num_ranks, schedule)) as pipe:
            folder.mkdir(parents=True, exist_ok=True)
            _introduce(console, pipe, text)
            log = _train(console, pipe, text, steps)
            _verify(console, pipe, text, steps)
            pair = _predicted_and_measured(pipe.schedule, log.timelines)
            _show_timelines(console, pair, len(log.timelines))
            files[0].write_text(stacked(pair), encoding="utf-8")
            export(files[1], pipe)
            files[2].write_text(_show_sample(console, pipe.eval().layers), encoding="utf-8")
    return files


def model() -> LayerSequence:
    """Return a GPT of 0.8 million parameters."""
    return gpt(vocabulary=VOCABULARY, width=128, heads=4, blocks=4, context=CONTEXT, dropout=0.05)


def sample(layers: LayerSequence) -> Iterator[str]:
    """Generate text after the prompt, piece by piece; the layers should be in eval mode."""
    drawn = generate(layers, tokens(PROMPT).long(), context=CONTEXT, temperature=TEMPERATURE)
    return map(characters, islice(drawn, SAMPLE_LENGTH))


@contextmanager
def _one_thread_per_rank() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _pipeline(text: Tensor, num_ranks: int, schedule: str) -> Pipeline:
    torch.manual_seed(0)
    return Pipeline(
        model(),
        loss,
        num_ranks=num_ranks,
        num_microbatches=NUM_MICROBATCHES,
        schedule=schedule,
        example_inputs=_batch(text, 0)[0],
    )


def _batch(text: Tensor, step: int) -> tuple[Tensor, Tensor]:
    return batch(text, step, size=BATCH_SIZE, context=CONTEXT)


def _introduce(console: Console, pipe: Pipeline, text: Tensor) -> None:
    size = sum(parameter.numel() for parameter in pipe.parameters())
    console.print(
        f"Training a GPT with {size / 1e6:.2f} million parameters on Python's standard library "
        f"({len(text) / 1e6:.1f} million tokens):\n{BATCH_SIZE} sequences of {CONTEXT} tokens per "
        f"step, in {NUM_MICROBATCHES} micro-batches, with schedule {pipe.schedule.name}"
    )
    names = [layer.name for layer in pipe.layers]
    for stage, (numbers, rank) in enumerate(
        zip(session_of(pipe).assembly.layout.stages, pipe.schedule.placement, strict=True)
    ):
        console.print(f"  stage {stage} on rank {rank}: {', '.join(names[n] for n in numbers)}")


def _train(console: Console, pipe: Pipeline, text: Tensor, steps: int) -> TrainingLog:
    """Run all steps, or those until Ctrl-C."""
    optimizer = torch.optim.AdamW(
        pipe.parameters(), LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARMUP_STEPS, 1 - step / steps)
    )
    log = TrainingLog()
    start = perf_counter()
    with progress(console, steps) as show_progress:
        try:
            for step in range(steps):
                with pipe.trace() as trace:
                    result = pipe.step(*_batch(text, step))
                timeline = trace.timeline
                pipe.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                log.losses.append(float(result.loss))
                log.timelines.append(timeline)
                show_progress(step + 1, _status(log, perf_counter() - start))
        except KeyboardInterrupt:
            if not log.timelines:
                raise
            optimizer.zero_grad()  # drop the gradients of the interrupted step
    losses = log.losses
    console.print(f"loss {losses[0]:.3f} at step 1, {losses[-1]:.3f} at step {len(losses)}")
    return log


def _status(log: TrainingLog, seconds: float) -> str:
    speed = len(log.losses) * BATCH_SIZE * CONTEXT / seconds
    return f"loss {log.losses[-1]:.3f}   {speed:,.0f} tokens/s   bubble {percent(log.bubble)}"


def _verify(console: Console, pipe: Pipeline, text: Tensor, steps: int) -> None:
    """Compare the pipeline with a plain loop on a batch that was not trained on."""
    pipe.verify(*_batch(text, steps))
    modules = pipe.layers.modules
    gradients, buffers = len(list(modules.parameters())), len(list(modules.buffers()))
    console.print(
        f"parity: {NUM_MICROBATCHES} losses, {gradients} gradients and {buffers} buffers are "
        "bit-identical to those of a plain loop on this machine"
    )


def _predicted_and_measured(
    schedule: Schedule, timelines: Sequence[Timeline]
) -> tuple[Timeline, Timeline]:
    """Return the schedule simulated with median times, and the step with the median time."""
    predicted = simulate(schedule, median_costs(timelines))
    predicted = replace(predicted, costs=None, name=f"{schedule.name}, predicted in ms")
    return predicted, median_timeline(timelines)


def _show_timelines(console: Console, timelines: Sequence[Timeline], num_steps: int) -> None:
    """Print the timelines one above the other, on the same time scale."""
    end = max(timeline.makespan for timeline in timelines)
    for timeline in timelines:
        if console.is_terminal:
            console.print("", coloured(timeline, console.width, end=end), sep="\n")
        else:
            console.print("", plain(timeline, console.width, end), sep="\n")
    num_ranks, num_cores = timelines[0].num_ranks, os.cpu_count() or 1
    console.print(
        "\nPredicted: simulated with the median time of each stage's actions in the last "
        f"{num_steps} steps.\nMeasured: the one of these steps that took the median time."
    )
    if num_ranks > num_cores:
        console.print(
            f"{num_ranks} ranks share {num_cores} cores here, so the time of an action includes "
            "waiting for a core."
        )


def _show_sample(console: Console, layers: LayerSequence) -> str:
    """Generate text and print it as it comes; return all of it."""
    console.print(f"\nText generated after {PROMPT!r} at temperature {TEMPERATURE}:\n")
    console.out(PROMPT, end="")
    written = PROMPT
    for piece in sample(layers):
        console.out(piece, end="")
        written += piece
    console.out("\n")
    return written
