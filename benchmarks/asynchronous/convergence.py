"""What gradients of old weights cost: a small GPT, trained by 1f1b, PipeDream and 2BW.

    python -m benchmarks.asynchronous.convergence            all of it: 116 trainings
    python -m benchmarks.asynchronous.convergence --quick    to try it out, under a minute
    python -m benchmarks.asynchronous.convergence --redraw   tables and picture of what was saved

The model is the demo's, half as wide and with a head of its own: a weight that the first and the
last stage share has no one version in a stream. It has no dropout, as no passage comes twice. All
rows have the same initial weights, passages and updates, and differ only in how old weights are.

Every schedule tries the same rates on the first seed. The one with the least training loss at the
end is its best one; with that, and with the best one of 1f1b, it runs on the other seeds too.
Gradients are not clipped: in a stream nobody knows the norm of all of them in time.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import closing
from functools import cache
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import Annotated

import torch
import typer
from benchmarks.asynchronous.curves import picture
from benchmarks.asynchronous.outcome import (
    WAYS,
    Outcome,
    Setting,
    Way,
    best_rates,
    load,
    save,
    shared_rate,
    table,
)
from rich.console import Console
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

import stageline as sl
from stageline.model.layers import LayerSequence
from stageline.training.progress import progress
from stageline.zoo.gpt import Head, gpt, loss
from stageline.zoo.text import VOCABULARY, batch, standard_library, tokens

RANKS = 4
CONTEXT = 64
BATCH = 8  # passages of an update
UPDATES, WARM_UP = 240, 20
OTHER_SEEDS = (1, 2)
RATES = {"SGD": (0.003, 0.01, 0.03, 0.1, 0.3), "AdamW": (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)}
QUICK_UPDATES = 30
QUICK_RATES = {"SGD": (0.1,), "AdamW": (3e-3,)}
HELD_OUT = 0.05  # of the text, its end
HELD_OUT_BATCHES, HELD_OUT_BATCH = 8, 32
HERE = Path(__file__).parent


def trained(setting: Setting, num_updates: int) -> Outcome:
    """One training from its beginning to its end, and what the guard says meanwhile."""
    torch.set_num_threads(1)
    text, unseen = texts()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with closing(pipeline(setting, num_updates)) as pipe:
            data = (passages(text, update, BATCH, setting.seed) for update in range(num_updates))
            results = list(pipe.run(data))
            held_out = evaluated(pipe.eval(), unseen)
    return Outcome(
        setting,
        [float(result.loss) for result in results],
        held_out,
        sum(bool(result.skipped) for result in results),
        "; ".join(str(w.message) for w in caught if issubclass(w.category, RuntimeWarning)),
    )


def pipeline(setting: Setting, num_updates: int) -> sl.Pipeline:
    """Optimizers and their rates are those of the demo, but for the clipping."""
    torch.manual_seed(setting.seed)

    def optimizer(parameters: list[nn.Parameter]) -> Optimizer:
        if setting.optimizer == "SGD":
            return SGD(parameters, setting.rate, momentum=0.9)
        return AdamW(parameters, setting.rate, betas=(0.9, 0.95), weight_decay=0.1)

    return sl.Pipeline(
        model(),
        loss,
        num_ranks=RANKS,
        num_microbatches=setting.way.num_microbatches,
        schedule=sl.build_schedule(
            setting.way.schedule,
            num_ranks=RANKS,
            num_microbatches=setting.way.num_microbatches,
            vertical_sync=setting.way.vertical_sync,
        ),
        balance=[3, 2, 2, 3],
        backend="serial",
        optimizer_fn=optimizer,
        scheduler_fn=lambda each: LambdaLR(
            each, lambda step: min((step + 1) / WARM_UP, 1 - step / num_updates)
        ),
        options=sl.Options(seed=setting.seed),
    )


def model() -> LayerSequence:
    """0.2 million parameters; the head's weights begin as the embedding's, and go their own way."""
    layers = gpt(vocabulary=VOCABULARY, width=64, heads=4, blocks=4, context=CONTEXT)
    head = layers.layers[-1].module
    assert isinstance(head, Head)
    head.weight = nn.Parameter(head.weight.detach().clone())
    return layers


@cache
def texts() -> tuple[Tensor, Tensor]:
    """To train on, and to hold out."""
    text = tokens(standard_library())
    end = round((1 - HELD_OUT) * len(text))
    return text[:end], text[end:]


def passages(text: Tensor, number: int, size: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    return batch(text, number, size=size, context=CONTEXT, seed=seed)


def evaluated(pipe: sl.Pipeline, unseen: Tensor) -> float:
    """The loss on the same passages for all."""
    losses = []
    with torch.no_grad():
        for number in range(HELD_OUT_BATCHES):
            inputs, target = passages(unseen, number, HELD_OUT_BATCH)
            losses.append(float(loss(pipe(inputs), target)))
    return fmean(losses)


def settings(rates: Mapping[str, Sequence[float]]) -> list[Setting]:
    """All that is tried on the first seed."""
    return [
        Setting(way, optimizer, rate, 0)
        for optimizer, tried in rates.items()
        for way in WAYS
        for rate in tried
    ]


def repeated(outcomes: Sequence[Outcome], seed: int) -> list[Setting]:
    """The best rates of each, and those of 1f1b, on another seed."""
    best = best_rates(outcomes)
    return [
        Setting(way, optimizer, rate, seed)
        for (optimizer, way), own in best.items()
        for rate in dict.fromkeys((own, shared_rate(best, optimizer, way)))
    ]


def outcomes_of(console: Console, wanted: Sequence[Setting], num_updates: int) -> list[Outcome]:
    """A process for each core; each training has one thread."""
    console.print(f"{len(wanted)} trainings of {num_updates} updates")
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool:
        futures = [pool.submit(trained, setting, num_updates) for setting in wanted]
        with progress(console, len(wanted)) as told:
            for number, future in enumerate(as_completed(futures)):
                told(number + 1, _words(future.result()))
    return [future.result() for future in futures]


def _words(outcome: Outcome) -> str:
    way, setting = outcome.setting.way, outcome.setting
    end = "diverged" if outcome.has_diverged else f"{outcome.held_out:.3f}"
    return f"{setting.optimizer} {setting.rate:g}, {way.name}, m = {way.num_microbatches}: {end}"


def delays() -> dict[Way, str]:
    """By stage, how many steps old the weights are that a gradient is of: the mean over m."""
    return {way: ", ".join(f"{delay:g}" for delay in _delays(way)) for way in WAYS}


def _delays(way: Way) -> Iterator[float]:
    if way.schedule == "1f1b":
        yield from [0.0] * RANKS
        return
    m, num_minibatches = way.num_microbatches, 3 * RANKS
    schedule = sl.build_schedule(
        way.schedule,
        num_ranks=RANKS,
        num_microbatches=m,
        num_minibatches=num_minibatches,
        vertical_sync=way.vertical_sync,
    )
    for row in schedule.actions:
        last = (action for action in row if action.microbatch // m == num_minibatches - 1)
        yield fmean(num_minibatches - 1 - action.version for action in last)


def main(
    folder: Annotated[Path, typer.Option(help="For curves (JSON) and picture.")] = HERE,
    quick: Annotated[bool, typer.Option("--quick", help="Few updates; saves nothing.")] = False,
    redraw: Annotated[bool, typer.Option("--redraw", help="What was saved before.")] = False,
) -> None:
    """Print a table for each optimizer, and draw the curves."""
    console = Console(width=None if sys.stdout.isatty() else 150, highlight=False, markup=False)
    path = folder / "convergence.json"
    start = perf_counter()
    if redraw:
        outcomes = load(path)
    elif quick:
        outcomes = outcomes_of(console, settings(QUICK_RATES), QUICK_UPDATES)
    else:
        outcomes = outcomes_of(console, settings(RATES), UPDATES)
        save(path, outcomes)
        for seed in OTHER_SEEDS:
            outcomes += outcomes_of(console, repeated(outcomes, seed), UPDATES)
            save(path, outcomes)
    if not quick:
        path.with_suffix(".svg").write_text(picture(outcomes, BATCH * CONTEXT), encoding="utf-8")
    console.print("held-out loss; ± half the range over seeds; ! the guard warned")
    for optimizer in RATES:
        console.print(table(outcomes, optimizer, delays()))
    if not redraw:
        console.print(f"{len(outcomes)} trainings in {(perf_counter() - start) / 60:.1f} minutes")


if __name__ == "__main__":
    typer.run(main)
