"""The demo's GPT on one rank and on two threads, beside a plain loop with one thread.

It is the demo's own model, with tied weights, with and without its dropout. A turn is several steps
in a row, as in training: after a pause, both threads share a core for the first 20 to 50 ms, until
the system moves one of them.
"""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.compare.agreement import check_agreement, plain_outcome
from benchmarks.compare.contestants import loops, ours
from benchmarks.compare.models import without_dropout
from benchmarks.compare.stages import balance_of
from benchmarks.compare.turns import close, take_turns
from benchmarks.compare.workloads import Case

import stageline as sl
from stageline.cli.demo import training as demo
from stageline.zoo import gpt
from stageline.zoo.text import VOCABULARY

COUNT, RANKS = demo.NUM_MICROBATCHES, 2
STEPS = 6  # in a row


def names() -> dict[str, bool]:
    """Return the cells, and whether each has dropout."""
    return {"one-rank | dropout": True, "one-rank | no dropout": False}


def demo_case(*, has_dropout: bool) -> Case:
    """Return the demo's model on random tokens."""
    torch.manual_seed(0)
    layers = demo.model()
    tokens = torch.randint(0, VOCABULARY, (demo.BATCH_SIZE, demo.CONTEXT))
    case = Case(layers, gpt.loss, {"x": tokens}, tokens.clone())
    return case if has_dropout else case._replace(layers=without_dropout(layers))


def measure(rounds: int, *, has_dropout: bool) -> dict[str, Any]:
    """Return the times of one rank, of two threads and of a plain loop."""
    torch.set_num_threads(1)
    plain = demo_case(has_dropout=False)
    found = _contestants(plain)
    check_agreement(found, plain, plain_outcome(plain, COUNT))
    if has_dropout:
        close(found)
        found = _contestants(demo_case(has_dropout=True))
    times = take_turns([each.in_a_row(STEPS) for each in found], rounds)
    close(found)
    return {"times": times}


def _contestants(case: Case) -> list[Any]:
    schedule = sl.build_schedule("1f1b", num_ranks=RANKS, num_microbatches=COUNT)
    balance = balance_of(case.layers, case.sample(COUNT), RANKS)
    return [
        loops.plain(case.copy(), COUNT),
        ours.serial(case.copy(), COUNT),
        ours.threads(case.copy(), schedule, balance),
    ]
