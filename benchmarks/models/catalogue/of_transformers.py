"""Make small models of transformers from the name of their class."""

from __future__ import annotations

from typing import Any

import transformers
from benchmarks.models.case import Batches, Case, Maker

VOCABULARY = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DECODER = VOCABULARY | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
ENCODER = {k: v for k, v in DECODER.items() if k not in ("num_key_value_heads", "head_dim")}
BART = VOCABULARY | {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 1,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
}
VIT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}


def of_transformers(model: str, batch: Batches, arguments: dict[str, Any], **further: Any) -> Maker:
    """Return what makes a model from a configuration of its own class with these arguments."""

    def make() -> Case:
        made = getattr(transformers, model)
        return Case(made(made.config_class(**{**arguments, **further})), batch)

    return make
