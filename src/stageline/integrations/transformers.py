"""A transformers `Trainer` whose model runs in a pipeline, in one process or in several."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments, logging

from stageline.checkpoint.export import export
from stageline.checkpoint.group import checkpoint_group
from stageline.checkpoint.load import load
from stageline.checkpoint.save import save
from stageline.errors import ModelError
from stageline.integrations.processes import num_processes
from stageline.integrations.single_process import single_process
from stageline.model.own_loss import own_loss
from stageline.options import Options
from stageline.pipeline import Pipeline
from stageline.runtime.batches.call import evaluate
from stageline.runtime.batches.microbatches import join, num_samples

LOSS, NUM_ITEMS = "loss", "num_items_in_batch"
CHECKPOINT = "stageline"  # the folder in a checkpoint of the Trainer's
RECOMPUTE = 'use pipeline={"recompute": "always"}'
REFUSED = {  # options of TrainingArguments, and what to do instead
    "fp16": "use bf16=True",
    "activation_checkpointing": RECOMPUTE,
    "gradient_checkpointing": RECOMPUTE,  # its older name
    "torch_compile": "omit it",
    "label_smoothing_factor": "compute it in the model's forward",
    "auto_find_batch_size": "omit it",
    "fsdp": "omit it: the pipeline divides the model",
    "deepspeed": "omit it: the pipeline divides the model",
}


class PipelineTrainer(Trainer):  # type: ignore[misc]  # transformers has no complete types
    """A `Trainer` that trains and evaluates in a pipeline; `pipeline` has the arguments of it.

    A batch of the Trainer's is a mini-batch of the pipeline, and its losses, gradients and weights
    are those of a plain Trainer with batches as large as a micro-batch, which accumulates the
    gradients of as many. The loss of a causal language model is the mean over the tokens of all
    micro-batches that count. State: whether the model divides its loss by their number.

    All processes of a process group are ranks of the pipeline. They make the same calls and read
    the same batches; the first of them logs and writes files.
    """

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments,
        *more: Any,
        pipeline: Mapping[str, Any],
        **others: Any,
    ) -> None:
        _check_options(args, others, pipeline)
        _make_single(args)
        super().__init__(model, args, *more, **others)
        self.divides_by_items: bool | None = None  # not known yet
        options = replace(pipeline.get("options") or Options(), count_fn=_count)
        self.pipe = Pipeline(model, _loss, **{**pipeline, "options": options})

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """Run a step of the pipeline; return the loss."""
        del model
        inputs = self._prepare_inputs(inputs)
        if self.model_accepts_loss_kwargs and num_items_in_batch is not None:
            inputs = {**inputs, NUM_ITEMS: torch.as_tensor(num_items_in_batch)}
        samples = num_samples(inputs)
        if self._is_divided(inputs):
            target = {"counts": torch.arange(samples) < 1, "is_mean": False}  # they add up to one
        else:
            counts = torch.full((samples,), self.current_gradient_accumulation_steps)
            target = {"counts": counts, "is_mean": True}
        self.pipe.train()
        losses = self.pipe.step(inputs, target).losses
        return _total(loss * weight for loss, weight in losses).to(self.args.device)

    def prediction_step(self, model: nn.Module, *arguments: Any, **named: Any) -> Any:
        """Return loss, logits and labels of a batch."""
        del model
        return super().prediction_step(self._outputs, *arguments, **named)

    def _outputs(self, **inputs: Any) -> dict[str, Any]:
        """Return the outputs of all micro-batches, with the loss of all of them."""
        outputs, sizes = self._microbatch_outputs(inputs)
        if not isinstance(outputs[0], Mapping):
            raise ModelError(
                f"the model returns a {type(outputs[0]).__name__}, but evaluation needs outputs by "
                "name: return a dict, or use return_dict=True"
            )
        found = join([{k: v for k, v in each.items() if k != LOSS} for each in outputs], sizes)
        if LOSS not in outputs[0]:
            return dict(found)
        shares = [1.0 if self._is_divided(inputs) else size / sum(sizes) for size in sizes]
        losses = (each[LOSS] * share for each, share in zip(outputs, shares, strict=True))
        return {LOSS: _total(losses), **found}

    def _microbatch_outputs(self, inputs: Mapping[str, Any]) -> tuple[list[Any], list[int]]:
        """Return the output of each micro-batch, and their sizes."""
        self.pipe.train()  # a forward is recorded first as it is trained
        session = self.pipe._opener.opened_for(inputs, {})  # noqa: SLF001  private to users
        self.pipe.eval()
        return evaluate(session, inputs, {})

    def _is_divided(self, inputs: Mapping[str, Any]) -> bool:
        """Return whether the model divides the sum of its loss by `num_items_in_batch`.

        Many models accept it and return the mean all the same, BERT's classifier for one. So it is
        tried: twice as many items have to halve the loss.
        """
        if NUM_ITEMS not in inputs:
            return False
        if self.divides_by_items is None:
            counts = inputs[NUM_ITEMS], 2 * inputs[NUM_ITEMS]
            tried = [self._microbatch_outputs({**inputs, NUM_ITEMS: count})[0] for count in counts]
            once, twice = (_total(map(own_loss, outputs)) for outputs in tried)
            if not once:
                return True  # no label counts: either is right, and the next batch may tell
            self.divides_by_items = bool(twice.abs() < 0.75 * once.abs())
        return self.divides_by_items

    def _wrap_model(self, model: nn.Module, *_: Any, **__: Any) -> nn.Module:
        return model

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        del model
        return self.pipe.clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | None = None) -> Tensor:
        del model
        return self.pipe.clip_grad_norm_(float("inf")) if grad_norm is None else grad_norm

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Write the model and its configuration; with several processes, join its parts first."""
        folder = Path(output_dir or self.args.output_dir)
        if num_processes() == 1:
            super()._save(str(folder), state_dict)
            return
        folder.mkdir(parents=True, exist_ok=True)
        whole = folder / "whole.safetensors"
        export(whole, self.pipe)
        checkpoint_group(self.pipe).run_on_first(lambda: self._save_whole(folder, whole))

    def _save_whole(self, folder: Path, whole: Path) -> str:
        """Write the model from the file that has all of its tensors, and remove that file."""
        stored = load_file(whole)
        first: dict[Tensor, str] = {}  # a tensor of several names stays one
        names = self.model.state_dict(keep_vars=True).items()
        state = {name: stored[first.setdefault(tensor, name)] for name, tensor in names}
        super()._save(str(folder), state)
        whole.unlink()
        return str(folder)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save as Stageline does: the state of all processes, and what random numbers depend on."""
        place, optimizer = Path(output_dir) / CHECKPOINT, self.optimizer.optimizer
        state = self.lr_scheduler.state_dict()
        save(place, self.pipe, optimizer, step=self.state.global_step, data=state)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and (Path(checkpoint) / CHECKPOINT).is_dir():
            found = load(Path(checkpoint) / CHECKPOINT, self.pipe, self.optimizer.optimizer)
            self.lr_scheduler.load_state_dict(found.data)

    def _save_rng_state(self, output_dir: str) -> None:
        if self.args.should_save:  # all processes draw the same
            super()._save_rng_state(output_dir)


def _make_single(args: TrainingArguments) -> None:
    """Let the arguments, and accelerate, see one process."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # it would warn of a process group that is not its own
    try:
        with single_process():
            vars(args).pop("_setup_devices", None)
            args._setup_devices  # noqa: B018, SLF001  a cached property
    finally:
        logging.set_verbosity(verbosity)


def _loss(output: Any, target: Mapping[str, Any]) -> Tensor:
    """Return the model's own loss, as a sum over samples if it is their mean."""
    loss = own_loss(output)
    return loss * len(target["counts"]) if target["is_mean"] else loss


def _total(losses: Iterable[Tensor]) -> Tensor:
    """Add losses one after another, as a loop does."""
    return sum(losses, torch.tensor(0.0))


def _count(target: Mapping[str, Any]) -> Tensor:
    found: Tensor = target["counts"].sum()
    return found


def _check_options(
    args: TrainingArguments, others: Mapping[str, Any], pipeline: Mapping[str, Any]
) -> None:
    for name, remedy in REFUSED.items():
        if value := getattr(args, name, None):
            raise ModelError(f"{name} is {value!r}, but does not work with a pipeline: {remedy}")
    for name in ("model_init", "compute_loss_func"):
        if others.get(name) is not None:
            raise ModelError(
                f"{name} was given, but the model and its loss run in the pipeline: omit it"
            )
    for name in ("loss_fn", "mesh"):
        if pipeline.get(name) is not None:
            raise ModelError(f"pipeline has {name!r}, but the Trainer decides it: omit it")
