"""accelerate's `Accelerator` around a pipeline's loop: loader, optimizer and scheduler."""

from __future__ import annotations

from typing import Any, NoReturn

from accelerate import Accelerator
from torch import Tensor, nn

from stageline.errors import ModelError
from stageline.integrations.single_process import single_process
from stageline.pipeline import Pipeline


class PipelineAccelerator(Accelerator):  # type: ignore[misc]  # accelerate has no complete types
    """An Accelerator that leaves the model to a pipeline.

    `prepare` takes the loader, the optimizer and the scheduler, in one process or in several, all
    of which read the same batches. Gradients come from `pipe.step`, or from `backward` of a loss on
    the pipeline's outputs.
    """

    def __init__(self, pipe: Pipeline, **options: Any) -> None:
        with single_process():
            super().__init__(**options)
        if self.gradient_accumulation_steps > 1:
            raise ModelError(
                f"gradient_accumulation_steps is {self.gradient_accumulation_steps}, but pipe.step "
                "does not divide its loss by it: omit it, and use larger batches of more "
                "micro-batches"
            )
        if self.scaler is not None:
            raise ModelError(
                "mixed_precision is 'fp16', but pipe.step does not scale its loss: use 'bf16'"
            )
        self.pipe = pipe

    def prepare_model(self, model: nn.Module, *_: Any, **__: Any) -> NoReturn:
        """Refuse a model: the pipeline has it."""
        raise ModelError(
            f"prepare was given a {type(model).__name__}, but the pipeline has the model, and "
            "wrapping it would change nothing in the pipeline: prepare loader, optimizer and "
            "scheduler only"
        )

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """Clip the gradients of all ranks; `parameters` has to be those of the pipeline."""
        given, own = set(parameters), set(self.pipe.parameters())
        if given != own or norm_type != 2:
            raise ModelError(
                f"clip_grad_norm_ was given {len(given)} parameters and norm_type {norm_type}, but "
                f"clips the {len(own)} of the pipeline by their 2-norm: give pipe.parameters()"
            )
        return self.pipe.clip_grad_norm_(max_norm)

    def save_state(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse to save: the Accelerator has no model."""
        raise ModelError(f"save_state {WITHOUT_MODEL}: use sl.save(folder, pipe, optimizer)")

    def load_state(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse to load: the Accelerator has no model."""
        raise ModelError(f"load_state {WITHOUT_MODEL}: use sl.load(folder, pipe, optimizer)")


WITHOUT_MODEL = "was called, but the model is in the pipeline, and not among what was prepared"
