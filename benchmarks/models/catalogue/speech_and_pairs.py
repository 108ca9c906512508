"""Models of transformers that hear, and models of pairs of images and texts."""

from __future__ import annotations

from benchmarks.models.case import Batch, noise, tokens
from benchmarks.models.catalogue.of_transformers import BART, ENCODER, VIT, of_transformers

WAVE = ENCODER | {
    "conv_dim": [16, 16],
    "conv_stride": [5, 4],
    "conv_kernel": [10, 8],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
    "layerdrop": 0.0,
    "mask_time_prob": 0.0,
    "vocab_size": 16,
}
PAIR = {
    "text_config": ENCODER | {"max_position_embeddings": 32},
    "vision_config": VIT,
}


def _features(num_samples: int, size: int) -> Batch:
    """Return spectra as Whisper takes them, of one length."""
    labels = tokens(num_samples, 6 + size)
    return {"input_features": noise(num_samples, 8, 32), "labels": labels}, None


def _padded_features(num_samples: int, size: int) -> Batch:
    length = 32 + 8 * size
    mask = tokens(num_samples, length).fill_(1)
    mask[1::2, -8:] = 0
    return {
        "input_features": noise(num_samples, length, 8),
        "attention_mask": mask,
        "labels": tokens(num_samples, 6 + size),
    }, None


def _wave(num_samples: int, size: int) -> Batch:
    return {
        "input_values": noise(num_samples, 400 + 80 * size),
        "labels": tokens(num_samples, 3, 16),
    }, None


def _pairs(num_samples: int, size: int) -> Batch:
    return {
        "input_ids": tokens(num_samples, 8 + size),
        "pixel_values": noise(num_samples, 3, 32, 32),
        "return_loss": True,
    }, None


CASES = {
    "Whisper": of_transformers(
        "WhisperForConditionalGeneration",
        _features,
        BART,
        num_mel_bins=8,
        max_source_positions=16,
        max_target_positions=32,
    ),
    "Speech2Text": of_transformers(
        "Speech2TextForConditionalGeneration",
        _padded_features,
        BART,
        input_feat_per_channel=8,
        conv_channels=16,
        max_source_positions=64,
        max_target_positions=32,
    ),
    "wav2vec2": of_transformers("Wav2Vec2ForCTC", _wave, WAVE),
    "HuBERT": of_transformers("HubertForCTC", _wave, WAVE),
    "CLIP": of_transformers("CLIPModel", _pairs, PAIR, projection_dim=16),
    "SigLIP": of_transformers("SiglipModel", _pairs, PAIR),
}
