"""Models of torchvision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.models.case import Case, Maker, images
from benchmarks.models.catalogue.losses import cross_entropy
from torch import Tensor, nn
from torchvision import models


def classifier(make: Callable[[], nn.Module], side: int = 32, step: int = 32) -> Maker:
    return lambda: Case(make(), images(side, step), cross_entropy)


def _with_auxiliaries(output: Any, target: Tensor) -> Tensor:
    """Return the loss of all heads, of which those in the middle count less."""
    last, *middle = [cross_entropy(each, target) for each in output]
    return last + 0.3 * sum(middle)


CASES = {
    "resnet50": classifier(lambda: models.resnet50(num_classes=5, width_per_group=8), step=16),
    "vit_b_16": classifier(
        lambda: models.VisionTransformer(32, 8, 4, 4, 16, 32, num_classes=5, dropout=0.1), step=0
    ),
    "densenet121": classifier(lambda: models.DenseNet(8, (2, 3, 2), 8, 2, 0.1, 5), side=64),
    "efficientnet_b0": classifier(lambda: models.efficientnet_b0(num_classes=5)),
    "mobilenet_v3": classifier(lambda: models.mobilenet_v3_small(num_classes=5)),
    "googlenet": lambda: Case(
        models.googlenet(num_classes=5, aux_logits=True, init_weights=False),
        images(64, 32),
        _with_auxiliaries,
    ),
    "shufflenet_v2": classifier(lambda: models.shufflenet_v2_x0_5(num_classes=5)),
}
