"""Files go from transformers to a pipeline and back with the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import stageline as sl

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}


def model(dtype: torch.dtype, *, is_tied: bool) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **SIZES, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=is_tied
    )
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)


def pipeline(made: Any, **options: Any) -> sl.Pipeline:
    """Cut a model by its modules; such a pipeline has weights, but cannot run."""
    layers = [
        sl.Layer("model.embed_tokens", made.model.embed_tokens),
        *(sl.Layer(f"model.layers.{n}", each) for n, each in enumerate(made.model.layers)),
        sl.Layer("model.norm", made.model.norm),
        sl.Layer("model.rotary_emb", made.model.rotary_emb),
        sl.Layer("lm_head", made.lm_head),
    ]
    return sl.Pipeline(
        sl.LayerSequence(tuple(layers), (made,)),
        torch.nn.functional.mse_loss,
        num_ranks=3,
        num_microbatches=1,
        backend="serial",
        **options,
    )


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", ["5GB", "20KB"])
def test_files_of_both_are_the_same(
    tmp_path: Path, is_tied: bool, dtype: torch.dtype, size: str
) -> None:
    made = model(dtype, is_tied=is_tied)
    made.save_pretrained(tmp_path / "theirs", max_shard_size=size)
    with torch.device("meta"):
        empty = model(dtype, is_tied=is_tied)
    pipe = pipeline(empty, init_fn=lambda _: None)
    assert sl.load_pretrained(pipe, tmp_path / "theirs") == ((), ())
    assert_equal(empty, made)
    sl.export(tmp_path / "ours", pipe, max_shard_size=size)
    found, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not any(info.values())
    assert found.dtype == dtype
    assert_equal(found, made)
    assert (found.lm_head.weight is found.model.embed_tokens.weight) == is_tied


def assert_equal(found: Any, wanted: Any) -> None:
    """Compare all tensors, with buffers that are not persistent."""
    state = found.state_dict() | dict(found.named_buffers())
    for name, tensor in (wanted.state_dict() | dict(wanted.named_buffers())).items():
        assert torch.equal(state.pop(name), tensor), name
    assert not state
