"""Workloads on which predictions and plans are tested, small enough for two cores."""

from __future__ import annotations

import torch
from torch import nn

from stageline.model.workload import Workload
from stageline.planning.profiling.profile import profile
from stageline.planning.profiling.profile_result import Profile
from stageline.zoo.gpt import gpt, loss
from stageline.zoo.unet import unet

BATCH = 32


def transformer() -> Workload:
    """Return a GPT whose blocks take most of the time."""
    torch.manual_seed(0)
    model = gpt(vocabulary=97, width=256, heads=4, blocks=6, context=64, dropout=0.0)
    tokens = torch.randint(0, 97, (BATCH, 64))
    return Workload(model, loss, tokens, tokens)


def embedding_heavy() -> Workload:
    """Return an imbalanced GPT: a large embedding, and most of the time in the head."""
    torch.manual_seed(0)
    model = gpt(vocabulary=4000, width=192, heads=4, blocks=6, context=64, dropout=0.0)
    tokens = torch.randint(0, 4000, (BATCH, 64))
    return Workload(model, loss, tokens, tokens)


def perceptron() -> Workload:
    """Return eight equal linear layers and a small one."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(8)]
    model = nn.Sequential(*blocks, nn.Linear(1024, 10))
    x, y = torch.randn(16 * BATCH, 1024), torch.randint(0, 10, (16 * BATCH,))
    return Workload(model, nn.functional.cross_entropy, x, y)


def narrow_transformer() -> Workload:
    """Return a GPT of many small blocks, in which the host's work counts."""
    torch.manual_seed(0)
    model = gpt(vocabulary=97, width=64, heads=4, blocks=12, context=16, dropout=0.1)
    tokens = torch.randint(0, 97, (8 * BATCH, 16))
    return Workload(model, loss, tokens, tokens)


def segmentation() -> Workload:
    """Return a U-Net, whose skip connections pass by the stages between, with a loss by pixel."""
    torch.manual_seed(0)
    model = unet(channels=3, classes=8, width=16)
    x, y = torch.randn(BATCH, 3, 64, 64), torch.randint(0, 8, (BATCH, 64, 64))
    return Workload(model, nn.functional.cross_entropy, x, y)


def profile_workload(workload: Workload, ranks: int, repeats: int = 7) -> Profile:
    """Measure micro-batches of a sixteenth to a half of the batch, with this many ranks at once."""
    size = len(workload.inputs)
    return profile(
        workload.model,
        workload.inputs,
        loss_fn=workload.loss_fn,
        target=workload.target,
        sizes=[size // share for share in (16, 8, 4, 2)],
        repeats=repeats,
        ranks=ranks,
    )


WORKLOADS = {"gpt": transformer, "gpt, large head": embedding_heavy, "perceptron": perceptron}
FURTHER_WORKLOADS = {"narrow gpt": narrow_transformer, "u-net": segmentation}
