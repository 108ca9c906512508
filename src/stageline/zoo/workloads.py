"""Workloads on which predictions and plans are tested, small enough for two cores."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn

from stageline.model.workload import Workload
from stageline.planning.profiling.profile import profile
from stageline.planning.profiling.profile_result import Profile
from stageline.zoo.gpt import gpt, loss
from stageline.zoo.resnet import resnet
from stageline.zoo.transformer import transformer
from stageline.zoo.unet import unet

BATCH = 32


def plain_gpt() -> Workload:
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


def residual_network() -> Workload:
    """Return a ResNet with BatchNorm, whose layers differ in time and in activations."""
    torch.manual_seed(0)
    model = resnet(channels=3, classes=10, width=24, blocks=[2, 2, 2])
    x, y = torch.randn(2 * BATCH, 3, 32, 32), torch.randint(0, 10, (2 * BATCH,))
    return Workload(model, nn.functional.cross_entropy, x, y)


def long_context() -> Workload:
    """Return a GPT of few blocks and long sequences, so that attention takes much of the time."""
    torch.manual_seed(0)
    model = gpt(vocabulary=97, width=128, heads=4, blocks=5, context=512, dropout=0.0)
    tokens = torch.randint(0, 97, (BATCH // 2, 512))
    return Workload(model, loss, tokens, tokens)


def language_model() -> Workload:
    """Return GPipe's Transformer, whose embedding and softmax have weights of their own."""
    torch.manual_seed(0)
    model = transformer(4, vocabulary=2000, width=256, heads=8)
    tokens = torch.randint(0, 2000, (BATCH, 48))
    return Workload(model, loss, tokens, tokens)


def tapered_perceptron() -> Workload:
    """Return linear layers of which each has three quarters of the width of the one before."""
    torch.manual_seed(0)
    widths = [int(1800 * 0.75**i) for i in range(9)]
    blocks = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in pairwise(widths)]
    model = nn.Sequential(*blocks, nn.Linear(widths[-1], 10))
    x, y = torch.randn(16 * BATCH, widths[0]), torch.randint(0, 10, (16 * BATCH,))
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


WORKLOADS = {"gpt": plain_gpt, "gpt, large head": embedding_heavy, "perceptron": perceptron}
FURTHER_WORKLOADS = {"narrow gpt": narrow_transformer, "u-net": segmentation}
# chosen before any of their steps was measured: predictions were not made to fit them
UNSEEN_WORKLOADS = {
    "resnet": residual_network,
    "gpt, long": long_context,
    "transformer": language_model,
    "tapered": tapered_perceptron,
}
ALL_WORKLOADS = WORKLOADS | FURTHER_WORKLOADS | UNSEEN_WORKLOADS
