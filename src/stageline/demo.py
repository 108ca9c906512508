"""The demo: a small GPT learns Python on a few ranks, is held to a plain loop, and is drawn.

    train ─► verify ─► predicted and measured timelines ─► checkpoint ─► a sample of its writing

Sizes are such that two cores need little more than a minute.
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
from stageline.pipeline import Pipeline
from stageline.planning.explain import median_costs, median_timeline
from stageline.report.summary import percent
from stageline.report.svg.drawing import stacked
from stageline.report.text.grid import plain
from stageline.report.text.terminal import coloured
from stageline.report.timeline import Timeline
from stageline.schedules.schedule import Schedule
from stageline.simulation.simulate import simulate
from stageline.training.progress import progress
from stageline.zoo.gpt import continued, gpt, loss
from stageline.zoo.text import VOCABULARY, batch, characters, standard_library, tokens

BATCH, MICROBATCHES, CONTEXT = 32, 8, 64
RATE, WARM_UP = 4e-3, 20  # of the optimizer, and the steps until it is reached
RECENT = 20  # steps whose times count
PROMPT, LENGTH, TEMPERATURE = "def ", 500, 0.8
WIDTH = 100  # columns, unless a terminal says otherwise


@dataclass(frozen=True)
class Training:
    """What is known of the steps so far."""

    losses: list[float] = field(default_factory=list)
    timelines: deque[Timeline] = field(default_factory=lambda: deque(maxlen=RECENT))

    @property
    def bubble(self) -> float:
        return median(timeline.step_bubble for timeline in self.timelines)


def run(folder: Path, *, steps: int, ranks: int, schedule: str) -> list[Path]:
    """The whole of it; gives back the files that it wrote."""
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False, markup=False)
    files = [folder / name for name in ("demo.svg", "gpt.safetensors", "sample.txt")]
    with _one_thread_for_each_rank():
        text = tokens(standard_library())
        with closing(_pipeline(text, ranks, schedule)) as pipe:
            folder.mkdir(parents=True, exist_ok=True)
            _introduce(console, pipe, text)
            training = _train(console, pipe, text, steps)
            _verify(console, pipe, text, steps)
            pair = _predicted_and_measured(pipe.schedule, training.timelines)
            _show(console, pair, len(training.timelines))
            files[0].write_text(stacked(pair), encoding="utf-8")
            export(files[1], pipe)
            files[2].write_text(_write(console, pipe.eval().layers), encoding="utf-8")
    return files


def model() -> LayerSequence:
    """0.8 million parameters."""
    return gpt(vocabulary=VOCABULARY, width=128, heads=4, blocks=4, context=CONTEXT, dropout=0.05)


def sample(layers: LayerSequence) -> Iterator[str]:
    """What it writes after the prompt, piece by piece; layers should be in evaluation."""
    drawn = continued(layers, tokens(PROMPT).long(), context=CONTEXT, temperature=TEMPERATURE)
    return map(characters, islice(drawn, LENGTH))


@contextmanager
def _one_thread_for_each_rank() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _pipeline(text: Tensor, ranks: int, schedule: str) -> Pipeline:
    torch.manual_seed(0)
    return Pipeline(
        model(),
        loss,
        num_ranks=ranks,
        num_microbatches=MICROBATCHES,
        schedule=schedule,
        sample=_batch(text, 0)[0],
    )


def _batch(text: Tensor, step: int) -> tuple[Tensor, Tensor]:
    return batch(text, step, size=BATCH, context=CONTEXT)


def _introduce(console: Console, pipe: Pipeline, text: Tensor) -> None:
    size = sum(parameter.numel() for parameter in pipe.parameters())
    console.print(
        f"A GPT of {size / 1e6:.2f} million parameters reads Python's standard library, "
        f"{len(text) / 1e6:.1f} million tokens;\n{BATCH} passages of {CONTEXT} a step, "
        f"in {MICROBATCHES} micro-batches, by {pipe.schedule.name}:"
    )
    names = [layer.name for layer in pipe.layers]
    for stage, (numbers, rank) in enumerate(zip(pipe.cut, pipe.schedule.placement, strict=True)):
        console.print(f"  stage {stage} on rank {rank}: {', '.join(names[n] for n in numbers)}")


def _train(console: Console, pipe: Pipeline, text: Tensor, steps: int) -> Training:
    """All steps, or as many as there are until Ctrl-C."""
    optimizer = torch.optim.AdamW(pipe.parameters(), RATE, betas=(0.9, 0.95), weight_decay=0.1)
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARM_UP, 1 - step / steps)
    )
    training = Training()
    start = perf_counter()
    with progress(console, steps) as told:
        try:
            for step in range(steps):
                with pipe.trace() as timeline:
                    result = pipe.step(*_batch(text, step))
                pipe.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
                rate.step()
                training.losses.append(float(result.loss))
                training.timelines.append(timeline)
                told(step + 1, _words(training, perf_counter() - start))
        except KeyboardInterrupt:
            if not training.timelines:
                raise
            optimizer.zero_grad()  # what the broken step left
    losses = training.losses
    console.print(f"loss {losses[0]:.3f} at step 1, {losses[-1]:.3f} at step {len(losses)}")
    return training


def _words(training: Training, seconds: float) -> str:
    speed = len(training.losses) * BATCH * CONTEXT / seconds
    bubble = percent(training.bubble)
    return f"loss {training.losses[-1]:.3f}   {speed:,.0f} tokens/s   bubble {bubble}"


def _verify(console: Console, pipe: Pipeline, text: Tensor, steps: int) -> None:
    """On a batch that it has not seen."""
    pipe.verify(*_batch(text, steps))
    modules = pipe.layers.modules
    gradients, buffers = len(list(modules.parameters())), len(list(modules.buffers()))
    console.print(
        f"parity: {MICROBATCHES} losses, {gradients} gradients and {buffers} buffers are those "
        "of a plain loop, bit for bit, on this machine"
    )


def _predicted_and_measured(
    schedule: Schedule, timelines: Sequence[Timeline]
) -> tuple[Timeline, Timeline]:
    """The schedule simulated with median times, and the step that took the median time."""
    predicted = simulate(schedule, median_costs(timelines))
    predicted = replace(predicted, costs=None, name=f"{schedule.name}, predicted in ms")
    return predicted, median_timeline(timelines)


def _show(console: Console, timelines: Sequence[Timeline], num_steps: int) -> None:
    """One over the other, on one scale of time."""
    end = max(timeline.makespan for timeline in timelines)
    for timeline in timelines:
        if console.is_terminal:
            console.print("", coloured(timeline, console.width, end=end), sep="\n")
        else:
            console.print("", plain(timeline, console.width, end), sep="\n")
    num_ranks, num_cores = timelines[0].num_ranks, os.cpu_count() or 1
    console.print(
        f"\nPredicted from the median times of each stage's actions in the last {num_steps} steps; "
        "measured: the\nstep that took the median time of these."
    )
    if num_ranks > num_cores:
        console.print(
            f"{num_ranks} ranks share {num_cores} cores here, so an action's time contains its "
            "waits for a core."
        )


def _write(console: Console, layers: LayerSequence) -> str:
    """Text of its own, shown as it comes."""
    console.print(f"\nAfter {PROMPT!r} it writes, at temperature {TEMPERATURE}:\n")
    console.out(PROMPT, end="")
    written = PROMPT
    for piece in sample(layers):
        console.out(piece, end="")
        written += piece
    console.out("\n")
    return written
