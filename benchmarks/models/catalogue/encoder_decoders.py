"""Encoder-decoders of transformers: every layer of the decoder reads the encoder's output."""

from __future__ import annotations

from typing import Any

from benchmarks.models.case import Maker, sequence_to_sequence
from benchmarks.models.catalogue.of_transformers import BART, VOCABULARY, of_transformers

T5 = VOCABULARY | {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 1,
}

PROPHETNET = VOCABULARY | {
    "hidden_size": 32,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "num_encoder_layers": 2,
    "num_decoder_layers": 2,
    "num_encoder_attention_heads": 4,
    "num_decoder_attention_heads": 4,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 1,
    "ngram": 2,
    "num_buckets": 8,
    "relative_max_distance": 16,
}


def encoder_decoder(model: str, arguments: dict[str, Any] = BART, **further: Any) -> Maker:
    return of_transformers(model, sequence_to_sequence, arguments, **further)


CASES = {
    "T5": encoder_decoder("T5ForConditionalGeneration", T5),
    "mT5": encoder_decoder("MT5ForConditionalGeneration", T5),
    "LongT5": encoder_decoder("LongT5ForConditionalGeneration", T5, local_radius=3),
    "Switch": encoder_decoder(
        "SwitchTransformersForConditionalGeneration",
        T5,
        num_experts=4,
        expert_capacity=8,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        num_decoder_layers=2,
        router_jitter_noise=0.0,
    ),
    "ProphetNet": encoder_decoder("ProphetNetForConditionalGeneration", PROPHETNET),
    "BART": encoder_decoder("BartForConditionalGeneration"),
    "Marian": encoder_decoder("MarianMTModel", decoder_vocab_size=64),
    "Pegasus": encoder_decoder("PegasusForConditionalGeneration"),
    "BlenderBot": encoder_decoder("BlenderbotForConditionalGeneration"),
    "M2M-100": encoder_decoder("M2M100ForConditionalGeneration"),
}
