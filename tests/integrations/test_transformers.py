"""`PipelineTrainer`: losses that count tokens or samples, resume, tied weights, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import stageline as sl

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from stageline.integrations.transformers import PipelineTrainer  # noqa: E402

LENGTH, VOCABULARY = 8, 20


def gpt2(dropout: float = 0.0, **others: Any) -> Any:
    torch.manual_seed(0)
    drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    sizes = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": 16, "n_layer": 2}
    config = transformers.GPT2Config(
        **sizes, **drop, n_head=2, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM", **others
    )
    return transformers.GPT2LMHeadModel(config)


def bert() -> Any:
    """It accepts `num_items_in_batch`, and ignores it."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertForSequenceClassification(config)


def passages(count: int) -> list[dict[str, Tensor]]:
    """Some labels do not count; in one sample none does."""
    torch.manual_seed(1)
    ids = torch.randint(VOCABULARY, (count, LENGTH))
    ignored = torch.arange(LENGTH) < torch.arange(count)[:, None] % (LENGTH + 1)
    rows = zip(ids, ids.masked_fill(ignored, -100), strict=True)
    return [{"input_ids": row, "labels": labels} for row, labels in rows]


def classified(count: int) -> list[dict[str, Tensor]]:
    return [{**each, "labels": each["input_ids"][0] % 2} for each in passages(count)]


def arguments(folder: Path, **others: Any) -> Any:
    fixed = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no"}
    options = {"max_steps": 4, "learning_rate": 1e-2, "logging_steps": 1, **fixed, **others}
    return transformers.TrainingArguments(str(folder), **options)


def pipelined(
    model: Any, data: list[dict[str, Tensor]], args: Any, **pipeline: Any
) -> PipelineTrainer:
    sizes = {"num_ranks": 2, "num_microbatches": 4} | pipeline
    return PipelineTrainer(model, args, train_dataset=data, eval_dataset=data, pipeline=sizes)


def plain(model: Any, data: list[dict[str, Tensor]], args: Any) -> Any:
    trainer = transformers.Trainer(model, args, train_dataset=data, eval_dataset=data)
    if isinstance(model, transformers.BertForSequenceClassification):
        trainer.loss_is_scaled_for_ga = False  # it takes what is accepted for what is used
    return trainer


@pytest.mark.parametrize(("build", "samples"), [(gpt2, passages), (bert, classified)])
def test_accumulated_batches_have_the_weights_of_a_plain_trainer(
    build: Any, samples: Any, tmp_path: Path
) -> None:
    # the uses of a tied weight are summed in another order than in a plain loop
    options = {"tie_word_embeddings": False} if build is gpt2 else {}
    model, other = build(**options), build(**options)
    args = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}
    trainer = pipelined(model, samples(32), arguments(tmp_path, **args))
    trainer.train()
    args = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8}
    plain(other, samples(32), arguments(tmp_path, **args)).train()
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    trainer.pipe.close()


@pytest.mark.parametrize(("build", "samples"), [(gpt2, passages), (bert, classified)])
def test_uneven_batches_have_the_losses_of_whole_ones(
    build: Any, samples: Any, tmp_path: Path
) -> None:
    """Of 7 and then 4 samples: micro-batches of different sizes, and counts of tokens."""
    args = {"per_device_train_batch_size": 7, "max_steps": 2, "per_device_eval_batch_size": 7}
    losses = []
    for make in (pipelined, plain):
        trainer = make(build(), samples(11), arguments(tmp_path, **args))
        before = trainer.evaluate()["eval_loss"]  # without a step before
        trainer.train()
        losses.append([before, *(each["loss"] for each in trainer.state.log_history[:2])])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_outputs_of_evaluation_have_the_order_of_the_samples(tmp_path: Path) -> None:
    data = passages(11)
    found = (
        make(gpt2(), data, arguments(tmp_path, per_device_eval_batch_size=7)).predict(data)
        for make in (pipelined, plain)
    )
    ours, theirs = (torch.tensor(each.predictions) for each in found)
    assert torch.allclose(ours, theirs, atol=1e-6)


def test_resumed_training_has_the_weights_of_an_undisturbed_run_with_dropout(
    tmp_path: Path,
) -> None:
    data = passages(32)
    example = {name: torch.stack([each[name] for each in data[:8]]) for name in data[0]}
    args = {"per_device_train_batch_size": 8, "save_strategy": "steps", "save_steps": 2}
    model, resumed = gpt2(dropout=0.5), gpt2(dropout=0.5)  # with tied weights
    trainer = pipelined(model, data, arguments(tmp_path, **args))
    trainer.train()
    again = pipelined(resumed, data, arguments(tmp_path, **args), example_inputs=example)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert all(map(torch.equal, model.parameters(), resumed.parameters()))
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "checkpoint-4")
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    assert all(map(torch.equal, model.parameters(), loaded.parameters()))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"activation_checkpointing": True}, "activation_checkpointing is True.*use pipeline="),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor is 0.1, but does not work"),
        ({"torch_compile": True}, "torch_compile is True, but does not work with a pipeline"),
    ],
)
def test_arguments_that_would_be_ignored_are_refused(
    options: dict[str, Any], text: str, tmp_path: Path
) -> None:
    with pytest.raises(sl.ModelError, match=text):
        pipelined(gpt2(), passages(8), arguments(tmp_path, **options))


def test_a_loss_or_mesh_of_the_pipelines_own_is_refused(tmp_path: Path) -> None:
    with pytest.raises(sl.ModelError, match="pipeline has 'loss_fn', but the Trainer decides it"):
        pipelined(gpt2(), passages(8), arguments(tmp_path), loss_fn=torch.sum)
    with pytest.raises(sl.ModelError, match="compute_loss_func was given, but the model and its"):
        PipelineTrainer(
            gpt2(), arguments(tmp_path), compute_loss_func=torch.sum, pipeline={"num_ranks": 2}
        )
