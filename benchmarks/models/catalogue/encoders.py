"""Encoders of transformers, which learn to fill masked words in."""

from __future__ import annotations

from typing import Any

from benchmarks.models.case import Maker, language_model
from benchmarks.models.catalogue.of_transformers import ENCODER, VOCABULARY, of_transformers

DISTILBERT = VOCABULARY | {
    "dim": 32,
    "hidden_dim": 48,
    "n_layers": 3,
    "n_heads": 4,
    "max_position_embeddings": 64,
}
XLM = VOCABULARY | {"emb_dim": 32, "n_layers": 3, "n_heads": 4, "max_position_embeddings": 64}


def encoder(model: str, arguments: dict[str, Any] = ENCODER, **further: Any) -> Maker:
    return of_transformers(model, language_model, arguments, **further)


CASES = {
    "BERT": encoder("BertForMaskedLM"),
    "RoBERTa": encoder("RobertaForMaskedLM"),
    "XLM-R": encoder("XLMRobertaForMaskedLM"),
    "DistilBERT": encoder("DistilBertForMaskedLM", DISTILBERT),
    "ALBERT": encoder("AlbertForMaskedLM", embedding_size=16),
    "ELECTRA": encoder("ElectraForMaskedLM", embedding_size=16),
    "DeBERTa-v2": encoder("DebertaV2ForMaskedLM"),
    "XLM": encoder("XLMWithLMHeadModel", XLM),
    "Longformer": encoder("LongformerForMaskedLM", attention_window=4),
    "ModernBERT": encoder(
        "ModernBertForMaskedLM", local_attention=8, cls_token_id=1, sep_token_id=2
    ),
}
