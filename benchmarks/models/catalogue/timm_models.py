"""Models of timm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import timm
from benchmarks.models.case import Case, Maker, images
from benchmarks.models.catalogue.losses import cross_entropy
from timm.models.mlp_mixer import MlpMixer
from torch import nn

SWIN: dict[str, Any] = {
    "img_size": 32,
    "patch_size": 2,
    "window_size": 4,
    "embed_dim": 8,
    "depths": (2, 2),
    "num_heads": (2, 4),
    "drop_path_rate": 0.1,
}
CONVNEXT: dict[str, Any] = {
    "depths": (1, 1, 2, 1),
    "dims": (8, 8, 16, 16),
    "drop_path_rate": 0.1,
}


def classifier(make: Callable[[], nn.Module], step: int = 32) -> Maker:
    return lambda: Case(make(), images(32, step), cross_entropy)


CASES = {
    "convnext": classifier(lambda: timm.create_model("convnext_atto", num_classes=5, **CONVNEXT)),
    "swin": classifier(
        lambda: timm.create_model("swin_tiny_patch4_window7_224", num_classes=5, **SWIN), step=0
    ),
    "regnet": classifier(lambda: timm.create_model("regnetx_002", num_classes=5)),
    "mixer": classifier(
        lambda: MlpMixer(img_size=32, patch_size=8, embed_dim=16, num_blocks=4, num_classes=5),
        step=0,
    ),
}
