"""`pipe.step`: one mini-batch forward and backward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from stageline.errors import ModelError
from stageline.runtime.batches import input_gradients
from stageline.runtime.batches.cut_batch import training_batch
from stageline.runtime.batches.loss_scaling import scale_of_step
from stageline.runtime.batches.result import StepResult, broadcast_results
from stageline.runtime.engine.minibatch import Purpose
from stageline.runtime.engine.session import Session


def train_step(
    session: Session,
    inputs: Any,
    target: Any,
    named: Mapping[str, Any],
    scaler: torch.amp.GradScaler | None,
) -> StepResult:
    """Add the gradients of one mini-batch to those that are there, and return its results."""
    assembly = session.assembly
    schedule = assembly.layout.schedule
    if assembly.is_asynchronous:
        raise ModelError(
            f"step was called, but {schedule.name!r} has several mini-batches on their "
            "way at a time: use for result in pipe.run(loader)"
        )
    scale = scale_of_step(session, scaler)
    minibatch = training_batch(session, inputs, target, named, scale)
    session.run(minibatch, Purpose.TRAIN, session.optimizers)
    session.num_steps += 1
    input_gradients.share(minibatch, assembly.collectives)
    input_gradients.pass_back(minibatch)
    return broadcast_results(minibatch, schedule, assembly.collectives)
