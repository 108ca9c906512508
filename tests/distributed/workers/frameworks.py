"""Runs the examples for other training loops as ranks of one group, and what they refuse."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from examples import accelerate_loop, bare_loop, lightning_module, transformers_trainer
from lightning import Trainer
from torch import nn
from torch.utils.data import default_collate
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

import stageline as sl
from stageline.integrations.accelerate import PipelineAccelerator
from stageline.integrations.transformers import PipelineTrainer


def residual() -> sl.Pipeline:
    batch = torch.zeros(32, 32)
    loss = nn.functional.cross_entropy
    model = lightning_module.model()
    return sl.Pipeline(model, loss, example_inputs=batch, num_ranks=2, num_microbatches=4)


def fit_with_checkpoints() -> None:
    """Lightning makes checkpoints unless it is told not to."""
    with residual() as pipe:
        module = lightning_module.Classifier(pipe, is_first=False)
        trainer = Trainer(accelerator="cpu", devices=1, max_epochs=1, logger=False)
        trainer.fit(module, lightning_module.loader(0, 128))


def fit_on_two_devices() -> None:
    with residual() as pipe:
        module = lightning_module.Classifier(pipe, is_first=False)
        trainer = Trainer(accelerator="cpu", devices=2, max_epochs=1, logger=False)
        trainer.fit(module, lightning_module.loader(0, 128))


def step_on_divided_batches() -> None:
    """A plain Accelerator gives each process a part of the batches."""
    AcceleratorState._reset_state(reset_partial_state=True)
    batches = Accelerator(cpu=True).prepare(lightning_module.loader(0, 128))
    with residual() as pipe:
        pipe.step(*next(iter(batches)))


def accelerate_after_another() -> None:
    with residual() as pipe:
        PipelineAccelerator(pipe, cpu=True)


def save_tied(folder: Path) -> None:
    """Change what this process has, and save the whole."""
    torch.manual_seed(0)
    tied = {"tie_word_embeddings": True}
    model = GPT2LMHeadModel(
        GPT2Config(**transformers_trainer.language_model().config.to_diff_dict() | tied)
    )
    batch = default_collate(transformers_trainer.samples(8))
    sizes = {"num_ranks": 2, "num_microbatches": 4, "example_inputs": batch}
    arguments = TrainingArguments(str(folder), use_cpu=True, report_to=[])
    trainer = PipelineTrainer(model, arguments, pipeline=sizes)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter in trainer.pipe.parameters():
            parameter.add_(1)
    trainer.save_model()
    trainer.pipe.close()
    saved = GPT2LMHeadModel.from_pretrained(folder)
    assert saved.lm_head.weight is saved.transformer.wte.weight
    pairs = zip(before, saved.parameters(), strict=True)
    assert all(torch.equal(old + 1, new) for old, new in pairs)


def message(act: Callable[[], None]) -> str:
    try:
        act()
    except sl.ModelError as error:
        return str(error)
    return "no error"


def main() -> None:
    os.environ["LOCAL_RANK"] = os.environ["RANK"]  # as launchers do
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    os.chdir(folder)
    save_tied(folder / "tied")
    found = {
        "bare_loop": bare_loop.train(2, folder=folder / "bare", show=False),
        "transformers_trainer": transformers_trainer.train(2, folder / "trainer"),
        "lightning_module": lightning_module.train(2, folder / "lightning", is_first=False),
        "accelerate_loop": accelerate_loop.train(2),
        "refused": [
            message(act)
            for act in (
                fit_with_checkpoints,
                fit_on_two_devices,
                step_on_divided_batches,
                accelerate_after_another,
            )
        ],
    }
    (folder / f"found-{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
