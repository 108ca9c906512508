"""The steps, checkpoints and resumption of a training run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from stageline.arguments import check_size
from stageline.checkpoint.folder import latest
from stageline.checkpoint.group import PendingSave, checkpoint_group
from stageline.checkpoint.load import Loaded, load_if
from stageline.checkpoint.option_values import try_scheduler_state
from stageline.checkpoint.pipeline_state import check_parameters, has_own_optimizers, tensor_names
from stageline.checkpoint.save import save
from stageline.errors import CheckpointError, ModelError
from stageline.pipeline import Pipeline
from stageline.training.data import DataPosition


@dataclass(frozen=True)
class TrainingRun:
    """The arguments of `fit`. The scheduler steps after every step of the optimizer."""

    pipe: Pipeline
    optimizer: Optimizer | None
    scheduler: LRScheduler | None
    steps: int
    max_norm: float | None
    folder: Path | None
    save_every: int
    report_every: int
    keep: int
    tensorboard: bool

    @property
    def scheduler_name(self) -> str:
        return "none" if self.scheduler is None else type(self.scheduler).__name__

    @property
    def has_own_optimizers(self) -> bool:
        return has_own_optimizers(self.pipe)

    def check(self) -> None:
        """Raise on all ranks if the arguments are invalid or differ between ranks."""
        for name in ("steps", "save_every", "report_every", "keep"):
            check_size(name, getattr(self, name))
        group = checkpoint_group(self.pipe)
        group.run(self._check_here)
        here = {
            "steps": self.steps,
            "save_every": self.save_every,
            "report_every": self.report_every,
            "keep": self.keep,
            "max_norm": self.max_norm,
            "folder": "given" if self.folder else "not given",
            "scheduler": self.scheduler_name,
        }
        for rank, there in enumerate(group.gather(here)):
            for name, value in there.items():
                if value != here[name]:
                    raise ModelError(
                        f"{name} is {here[name]} on this rank and {value} on rank {rank}: call fit "
                        "with the same arguments on all ranks"
                    )

    def _check_here(self) -> None:
        if self.tensorboard and self.folder is None:
            raise ModelError("tensorboard is True, but folder is None: set folder=")
        if self.max_norm is not None and not self.max_norm > 0:
            raise ModelError(f"max_norm is {self.max_norm!r}, but must be greater than 0")
        if self.has_own_optimizers:
            for name in ("optimizer", "scheduler", "max_norm"):
                if getattr(self, name) is not None:
                    raise ModelError(
                        f"{name} was given to fit, but the pipeline steps its own optimizer: give "
                        f"{name} to Pipeline"
                    )
        if self.optimizer is not None:
            check_parameters(self.optimizer, tensor_names(self.pipe))
        if self.scheduler is not None and self.scheduler.optimizer is not self.optimizer:
            raise ModelError(
                "the scheduler has another optimizer: make it for the optimizer given to fit"
            )

    def resume(self) -> tuple[int, DataPosition]:
        """Load the latest checkpoint, if any; return the steps done and the data position."""
        folder, group = self.folder, checkpoint_group(self.pipe)
        if folder is None or not group.run_on_first(lambda: latest(folder) is not None):
            return 0, DataPosition()
        step, data = load_if(self._accept, folder, self.pipe, self.optimizer)
        if self.scheduler is not None:
            _, state = data["scheduler"]
            self.scheduler.load_state_dict(try_scheduler_state(state, self.scheduler, folder))
        return step, DataPosition(*data["position"])

    def _accept(self, loaded: Loaded) -> None:
        """Raise `CheckpointError` for a checkpoint that this run cannot resume from."""
        assert self.folder is not None  # the checkpoint is in it
        step, data = loaded
        if not isinstance(data, dict) or not {"position", "scheduler"} <= data.keys():
            raise CheckpointError(
                f"the checkpoint of step {step} in {str(self.folder)!r} was not saved by sl.fit, "
                "so the position of the data is unknown: use another folder"
            )
        kind, state = data["scheduler"]
        if kind != self.scheduler_name:
            raise CheckpointError(
                f"the checkpoint of step {step} was saved with scheduler {kind}, but now it is "
                f"{self.scheduler_name}: use the same scheduler"
            )
        if self.scheduler is not None:
            try_scheduler_state(state, self.scheduler, self.folder)

    def update(self) -> None:
        """Clip the gradients and step the optimizer and its scheduler, as far as there are any."""
        if self.max_norm is not None:
            self.pipe.clip_grad_norm_(self.max_norm)
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()
        if self.scheduler is not None:
            self.scheduler.step()

    def save(self, step: int, position: DataPosition, *, wait: bool) -> PendingSave | None:
        """Save a checkpoint, if there is a folder for it."""
        if self.folder is None:
            return None
        state = None if self.scheduler is None else self.scheduler.state_dict()
        data = {"position": position, "scheduler": (self.scheduler_name, state)}
        return save(
            self.folder,
            self.pipe,
            self.optimizer,
            step=step,
            data=data,
            keep=self.keep,
            wait=wait,
        )
