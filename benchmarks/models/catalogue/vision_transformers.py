"""Vision models of transformers, with their own loss."""

from __future__ import annotations

from typing import Any

from benchmarks.models.case import Batch, Maker, labelled_images, noise, tokens
from benchmarks.models.catalogue.of_transformers import VIT, of_transformers

SWIN = {
    "image_size": 32,
    "patch_size": 2,
    "window_size": 4,
    "embed_dim": 8,
    "depths": [2, 2],
    "num_heads": [2, 4],
}
SEGFORMER = {
    "num_encoder_blocks": 2,
    "depths": [2, 2],
    "sr_ratios": [2, 1],
    "hidden_sizes": [8, 16],
    "patch_sizes": [7, 3],
    "strides": [4, 2],
    "num_attention_heads": [1, 2],
    "mlp_ratios": [2, 2],
    "decoder_hidden_size": 16,
}


def classifier(model: str, arguments: dict[str, Any] = VIT, **further: Any) -> Maker:
    return of_transformers(model, labelled_images, arguments, num_labels=5, **further)


def _segmented(num_samples: int, size: int) -> Batch:
    side = 32 + 16 * size
    labels = tokens(num_samples, side * side).view(num_samples, side, side) % 5
    return {"pixel_values": noise(num_samples, 3, side, side), "labels": labels}, None


CASES = {
    "ViT": classifier("ViTForImageClassification"),
    "DeiT": classifier("DeiTForImageClassification"),
    "BEiT": classifier("BeitForImageClassification"),
    "DINOv2": classifier("Dinov2ForImageClassification"),
    "Swin of transformers": classifier("SwinForImageClassification", SWIN),
    "SegFormer": of_transformers(
        "SegformerForSemanticSegmentation", _segmented, SEGFORMER, num_labels=5
    ),
}
