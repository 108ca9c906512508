"""Decoders of transformers: language models, some with experts, some without attention."""

from __future__ import annotations

from typing import Any

from benchmarks.models.case import Case, Maker, language_model, unpadded
from benchmarks.models.catalogue.of_transformers import (
    DECODER,
    ENCODER,
    VOCABULARY,
    of_transformers,
)

GPT2 = VOCABULARY | {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "output_router_logits": True}
LATENT_ATTENTION = {  # and experts in groups
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
OPT = VOCABULARY | {
    "hidden_size": 32,
    "word_embed_proj_dim": 32,
    "ffn_dim": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
BLOOM = VOCABULARY | {"hidden_size": 32, "n_layer": 3, "n_head": 4}
GPT_NEO = VOCABULARY | {
    "hidden_size": 32,
    "num_layers": 4,
    "num_heads": 4,
    "attention_types": [[["global", "local"], 2]],
    "window_size": 4,
    "max_position_embeddings": 64,
}
MAMBA = VOCABULARY | {"hidden_size": 16, "num_hidden_layers": 3, "state_size": 4}


def decoder(model: str, arguments: dict[str, Any] = DECODER, **further: Any) -> Maker:
    return of_transformers(model, language_model, arguments, **further)


def checkpointed(make: Maker) -> Maker:
    """Return what makes the model with its own gradient checkpointing switched on."""

    def made() -> Case:
        case = make()
        enable: Any = case.model.gradient_checkpointing_enable
        enable()
        return case

    return made


CASES = {
    "Llama": decoder("LlamaForCausalLM"),
    "Qwen3": decoder("Qwen3ForCausalLM", tie_word_embeddings=True),
    "Mixtral": decoder("MixtralForCausalLM", num_local_experts=4, **EXPERTS),
    "GPT-2": decoder("GPT2LMHeadModel", GPT2),
    "Qwen3-MoE": decoder("Qwen3MoeForCausalLM", num_experts=4, moe_intermediate_size=16, **EXPERTS),
    "OLMoE": decoder("OlmoeForCausalLM", num_experts=4, **EXPERTS),
    "DeepSeek-V3": decoder("DeepseekV3ForCausalLM", DECODER | LATENT_ATTENTION),
    "Mistral": decoder("MistralForCausalLM", sliding_window=8),
    "Gemma 2": decoder("Gemma2ForCausalLM"),
    "Gemma 3": decoder("Gemma3ForCausalLM", sliding_window=8),
    "Granite": decoder("GraniteForCausalLM"),
    "OLMo 2": decoder("Olmo2ForCausalLM"),
    "StableLM": decoder("StableLmForCausalLM"),
    "Cohere": decoder("CohereForCausalLM"),
    "Phi": decoder("PhiForCausalLM", ENCODER),
    "Phi-3": decoder("Phi3ForCausalLM"),
    "OPT": decoder("OPTForCausalLM", OPT),
    "BLOOM": decoder("BloomForCausalLM", BLOOM),
    "Falcon": decoder(
        "FalconForCausalLM",
        VOCABULARY | {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4},
    ),
    "GPT-NeoX": decoder("GPTNeoXForCausalLM", ENCODER),
    "GPT-Neo": decoder("GPTNeoForCausalLM", GPT_NEO),
    "GPT-J": decoder("GPTJForCausalLM", GPT2, rotary_dim=4),
    "CodeGen": decoder("CodeGenForCausalLM", GPT2, rotary_dim=4, n_ctx=64),
    "Granite MoE": decoder("GraniteMoeForCausalLM", num_local_experts=4, num_experts_per_tok=2),
    "GPT-OSS": decoder("GptOssForCausalLM", num_local_experts=4, sliding_window=8, **EXPERTS),
    "XLNet": decoder(
        "XLNetLMHeadModel", VOCABULARY | {"d_model": 32, "n_layer": 3, "n_head": 4, "d_inner": 48}
    ),
    "Llama, checkpointed": checkpointed(decoder("LlamaForCausalLM")),
    "Mamba": of_transformers("MambaForCausalLM", unpadded, MAMBA),
    "Mamba-2": of_transformers(
        "Mamba2ForCausalLM", unpadded, MAMBA, num_heads=4, head_dim=8, n_groups=1, chunk_size=4
    ),
}
