"""A LightningModule whose model runs in a pipeline, with manual optimization."""

from __future__ import annotations

from typing import Any, Self

from lightning import LightningModule

from stageline.checkpoint.pipeline_state import counters_of, set_counters
from stageline.errors import ModelError
from stageline.integrations.processes import check_group, num_processes
from stageline.pipeline import Pipeline

COUNTERS = "stageline"  # the key in a checkpoint


class PipelineModule(LightningModule):  # type: ignore[misc]  # lightning's types are not followed
    """A LightningModule around a pipeline. Its `training_step` calls `self.pipe.step`.

    The model is `self.model`, so that Lightning's checkpoints have its weights. With several
    processes each has the weights of its own stages only, and a checkpoint of Lightning's is
    refused: use `sl.save`.
    """

    def __init__(self, pipe: Pipeline) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.pipe, self.model = pipe, pipe.model

    def setup(self, stage: str) -> None:
        """Raise if the Trainer has processes of its own, or would save parts of the model."""
        del stage
        check_group()
        if self.trainer.world_size > 1:
            raise ModelError(
                f"the Trainer has {self.trainer.world_size} processes, each with the whole model, "
                "but the pipeline has the processes as its ranks: use Trainer(devices=1)"
            )
        if self.trainer.checkpoint_callbacks:
            _check_complete()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what random numbers depend on; raise if this process has but a part of the model."""
        _check_complete()
        checkpoint[COUNTERS] = counters_of(self.pipe)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Continue with the random numbers that come next."""
        if COUNTERS in checkpoint:
            set_counters(self.pipe, **checkpoint[COUNTERS])

    def train(self, mode: bool = True) -> Self:
        """Switch the pipeline with the module."""
        super().train(mode)
        self.pipe.train(mode)
        return self

    def on_validation_model_train(self) -> None:
        """Switch back after a validation; Lightning restores the modes of modules only."""
        super().on_validation_model_train()
        self.pipe.train(self.model.training)


def _check_complete() -> None:
    """Raise if there are several processes."""
    if (count := num_processes()) > 1:
        raise ModelError(
            f"Lightning would save a checkpoint in each of {count} processes, but each has the "
            "weights of its own stages only: use Trainer(enable_checkpointing=False), and "
            "sl.save(folder, pipe, optimizer)"
        )
