"""GPipe, 1F1B, interleaved 1F1B, ZB-V, PipeDream and 2BW on the same work: throughput and memory.

Sixteen equal layers on four ranks, eight micro-batches. A layer occupies its rank for a time and
holds real bytes: weights, gradients and momentum, and half of its weights' bytes for each
micro-batch, as a layer of Transformer-48 does with micro-batches of one sequence. Each rank is a
process (worker.py), whose memory the operating system counts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import stageline as sl
from experiments.results import Results
from stageline.zoo.emulated import Occupy

RANKS, MICROBATCHES, LAYERS = 4, 8, 16
FLOATS = 2**17  # of what a layer writes for a micro-batch; its weights have twice as many
SECONDS = 0.01  # of a layer's forward, and of each of its gradients
STREAM = 24  # micro-batches of an asynchronous run, of which the middle third is measured
FREED_AT_ONCE = {  # the environment in which glibc keeps nothing for later
    "MALLOC_MMAP_THRESHOLD_": "32768",
    "MALLOC_TRIM_THRESHOLD_": "0",
    "MALLOC_TOP_PAD_": "0",
}


class Variant(NamedTuple):
    """A schedule, the micro-batches between two of its updates, and what it recomputes."""

    title: str
    schedule: str
    num_microbatches: int = MICROBATCHES
    recompute: str = "never"

    @property
    def is_asynchronous(self) -> bool:
        return self.schedule in sl.schedule_names(synchronous=False)

    @property
    def num_minibatches(self) -> int:
        """Return the number of mini-batches of a run, if it is a stream."""
        return STREAM // self.num_microbatches


VARIANTS = (
    Variant("GPipe, recomputed", "gpipe", recompute="always"),
    Variant("GPipe", "gpipe"),
    Variant("1F1B", "1f1b"),
    Variant("interleaved 1F1B", "interleaved_1f1b"),
    Variant("ZB-V", "zbv"),
    Variant("PipeDream", "pipedream", num_microbatches=1),  # an update after each, as in its paper
    Variant("PipeDream-2BW", "pipedream_2bw"),
)
BY_TITLE = {variant.title: variant for variant in VARIANTS}


class Block(nn.Module):
    """A layer that takes `seconds` for its forward and each gradient, and holds real bytes."""

    def __init__(self, seconds: float, floats: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(2, floats, 1))
        self.occupy = Occupy(seconds, seconds, seconds)  # saves what it reads for its weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.occupy(x + self.bias.sum(dim=0))
        return y


def schedule_of(variant: Variant) -> sl.Schedule:
    """Return the schedule of a step, or of a whole run if it is a stream."""
    sizes: dict[str, Any] = {"num_ranks": RANKS, "num_microbatches": variant.num_microbatches}
    if variant.is_asynchronous:
        sizes["num_minibatches"] = variant.num_minibatches
    return sl.build_schedule(variant.schedule, **sizes)


def costs_of(variant: Variant) -> sl.Costs:
    """Return seconds and bytes of the stages.

    For each micro-batch a layer saves what it adds up, and a stage keeps its input and its output,
    until its I; W needs only what layers saved.
    """
    num_stages = schedule_of(variant).num_stages
    layers, written = LAYERS // num_stages, 4.0 * FLOATS
    weights = 2 * layers * written
    read, sent = ([written] * num_stages for _ in range(2))
    read[0] = sent[-1] = 0.0
    needed = [layers * written + a + b for a, b in zip(read, sent, strict=True)]
    again = variant.recompute == "always"
    kept = read if again else needed
    seconds = layers * SECONDS
    return sl.Costs(
        forward=[seconds] * num_stages,
        input_grad=seconds,
        weight_grad=seconds,
        recompute=seconds if again else 0.0,
        activation=kept,
        retained=[min(layers * written, size) for size in kept],
        working_set=[size - other for size, other in zip(needed, kept, strict=True)],
        parameters=weights,
        gradients=weights,
        optimizer_state=weights,
    )


def simulated(variant: Variant) -> dict[str, Any]:
    """Return micro-batches per second, and the bytes that each rank holds at most."""
    timeline = sl.simulate(schedule_of(variant), costs_of(variant))
    one = variant.num_microbatches / timeline.makespan
    rate = stream_rate(timeline, variant) if variant.is_asynchronous else one
    return {"rate": rate, "peaks": list(timeline.peak_memory)}


def stream_rate(timeline: sl.Timeline, variant: Variant) -> float:
    """Return the micro-batches per unit of time in the middle third of a stream."""
    ends = [span.end for span in timeline.spans[0] if span.action.kind is sl.Kind.STEP]
    return variant.num_microbatches * middle_rate(ends)


def middle_rate(ends: Sequence[float]) -> float:
    """Return how many ends there are per unit of time in the middle third.

    >>> middle_rate([0, 5, 6, 8, 10, 11])  # from 6 to 10
    0.5
    """
    first, last = len(ends) // 3, -(-2 * len(ends) // 3)
    return (last - first) / (ends[last] - ends[first])


def measured(variant: Variant, steps: int) -> dict[str, Any]:
    """Return the same as measured by the ranks' processes; rates of all steps."""
    worker = Path(__file__).with_name("worker.py")
    launch = [sys.executable, "-m", "stageline", "run", "--num-processes", str(RANKS)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        subprocess.run(
            [*launch, str(worker), variant.title, str(steps), str(path)],
            env=os.environ | FREED_AT_ONCE | {"OMP_NUM_THREADS": "1", "PYTHONPATH": search_path()},
            check=True,
            timeout=300,
        )
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def search_path() -> str:
    """Return where the processes find `experiments`, which is not installed."""
    root = str(Path(__file__).parents[2])
    return os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])


def simulate_once(results: Results, variant: Variant) -> None:
    """Store the simulated throughput and memory."""
    results.run_once(f"simulate {variant.title}", lambda: simulated(variant), seed=0)
