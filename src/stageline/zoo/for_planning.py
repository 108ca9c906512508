"""The models that predictions and choices are tried on, small enough for two cores."""

from __future__ import annotations

import torch
from torch import nn

from stageline.planning.profiling.profile import profile
from stageline.planning.profiling.profile_result import Profile
from stageline.verification import Case
from stageline.zoo.gpt import gpt, loss

BATCH = 32


def transformer() -> Case:
    torch.manual_seed(0)
    model = gpt(vocabulary=97, width=256, heads=4, blocks=6, context=64, dropout=0.0)
    tokens = torch.randint(0, 97, (BATCH, 64))
    return Case(model, loss, tokens, tokens)


def embedding_heavy() -> Case:
    """Badly unbalanced: a large embedding, and most of the time in the head."""
    torch.manual_seed(0)
    model = gpt(vocabulary=4000, width=192, heads=4, blocks=6, context=64, dropout=0.0)
    tokens = torch.randint(0, 4000, (BATCH, 64))
    return Case(model, loss, tokens, tokens)


def perceptron() -> Case:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(8)]
    model = nn.Sequential(*blocks, nn.Linear(1024, 10))
    x, y = torch.randn(16 * BATCH, 1024), torch.randint(0, 10, (16 * BATCH,))
    return Case(model, nn.functional.cross_entropy, x, y)


def profiled(case: Case, ranks: int) -> Profile:
    """For micro-batches of a sixteenth to a half of the batch, with as many ranks at work."""
    size = len(case.inputs)
    return profile(
        case.model,
        case.inputs,
        loss_fn=case.loss_fn,
        target=case.target,
        sizes=[size // share for share in (16, 8, 4, 2)],
        ranks=ranks,
    )


CASES = {"gpt": transformer, "gpt, large head": embedding_heavy, "perceptron": perceptron}
