"""Train, evaluate and save with transformers' Trainer, in one process or in several.

python examples/transformers_trainer.py
stageline run --num-processes 2 examples/transformers_trainer.py
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from stageline.integrations.transformers import PipelineTrainer
from stageline.zoo.text import VOCABULARY, standard_library, tokens

CONTEXT = 32


def language_model() -> GPT2LMHeadModel:
    """Return a tiny GPT-2 with random weights."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=CONTEXT,
        n_embd=32,
        n_layer=4,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=False,  # tied ones work too, but are summed in another order
    )
    return GPT2LMHeadModel(config)


def samples(count: int = 40) -> list[dict[str, Tensor]]:
    """Return passages of Python's standard library; some have labels that do not count (-100)."""
    passages = tokens(standard_library())[: count * CONTEXT].long().view(count, CONTEXT)
    ignored = torch.arange(CONTEXT) < torch.arange(count)[:, None] % 7
    labels = passages.masked_fill(ignored, -100)
    return [
        {"input_ids": ids, "labels": ids_or_ignored}
        for ids, ids_or_ignored in zip(passages, labels, strict=True)
    ]


def arguments(folder: Path, **others: Any) -> TrainingArguments:
    """Return the Trainer's arguments: clipping, a schedule, evaluation and checkpoints."""
    return TrainingArguments(
        str(folder),
        max_steps=6,
        learning_rate=3e-3,
        warmup_steps=2,
        max_grad_norm=1.0,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=3,
        save_steps=3,
        seed=0,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        **others,
    )


def train(num_ranks: int, folder: Path) -> list[dict[str, float]]:
    """Train, evaluate and save a model; return what the Trainer logged."""
    held_out, data = samples()[:8], samples()[8:]
    trainer = PipelineTrainer(
        language_model(),
        arguments(folder, per_device_train_batch_size=8),
        train_dataset=data,
        eval_dataset=held_out,
        pipeline={"num_ranks": num_ranks, "num_microbatches": 4},
    )
    trainer.train()
    trainer.save_model(str(folder / "model"))
    if trainer.is_world_process_zero():
        for each in trainer.state.log_history:
            if found := each.get("loss", each.get("eval_loss")):
                kind = "loss" if "loss" in each else "evaluation"
                print(f"step {each['step']}   {kind} {found!r}")
        model = GPT2LMHeadModel.from_pretrained(folder / "model")  # needs no Stageline
        print(f"saved {model.num_parameters():,} parameters")
    trainer.pipe.close()
    return list(trainer.state.log_history)


def main(
    num_ranks: Annotated[int, typer.Option(help="Ranks, if there is only one process.")] = 2,
    folder: Annotated[Path, typer.Option(help="For checkpoints and the model.")] = Path(
        "run-trainer"
    ),
) -> None:
    """Train a tiny GPT-2 on Python's standard library."""
    is_launched = "RANK" in os.environ
    if is_launched:
        dist.init_process_group()
    torch.set_num_threads(1)
    train(dist.get_world_size() if is_launched else num_ranks, folder)
    if is_launched:
        dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
