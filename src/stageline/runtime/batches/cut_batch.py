"""From the caller's batch to a mini-batch: cut into micro-batches, each with its weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from stageline.errors import BatchError, ModelError
from stageline.model import trees
from stageline.model.inputs import batch_inputs, microbatch_inputs
from stageline.runtime.batches import microbatches
from stageline.runtime.engine.minibatch import MiniBatch
from stageline.runtime.engine.session import Session
from stageline.runtime.exactness.caller_context import ForwardContext
from stageline.runtime.stage.stage_values import Target


def training_batch(
    session: Session,
    inputs: Any,
    target: Any,
    named: Mapping[str, Any],
    scale: Tensor | None = None,
) -> MiniBatch:
    """Return a mini-batch to train on, with gradients that are multiplied by `scale`."""
    if torch.is_inference_mode_enabled():
        raise ModelError(
            "a step was asked for in torch.inference_mode(), where nothing has a gradient: leave "
            "it first, or call the pipeline for outputs"
        )
    given = batch_inputs(session.assembly.layout.layers, inputs, named)
    sizes = _sizes(session, given, target)
    targets = microbatches.cut(target, sizes)
    minibatch = _minibatch(session, given, sizes)
    weights = _weights(session, sizes, targets, minibatch.inputs)
    loss_fn = session.assembly.settings.loss_fn
    pairs = zip(targets, weights, strict=True)
    minibatch.targets = [Target(loss_fn, part, weight, scale) for part, weight in pairs]
    return minibatch


def forward_batch(
    session: Session, inputs: Any, named: Mapping[str, Any]
) -> tuple[MiniBatch, list[int]]:
    """Return a mini-batch to compute outputs of, and the sizes of its micro-batches."""
    given = batch_inputs(session.assembly.layout.layers, inputs, named)
    sizes = _sizes(session, given)
    return _minibatch(session, given, sizes), sizes


def cut_by_caller(session: Session, parts: Sequence[Any], seed: int) -> MiniBatch:
    """Return a mini-batch of micro-batches that the caller has cut, with a seed of its own."""
    layers = session.assembly.layout.layers
    given = [microbatch_inputs(layers, batch_inputs(layers, part)) for part in parts]
    minibatch = _of_parts(session, given)
    minibatch.seed, minibatch.has_own_seed = seed, True
    return minibatch


def streamed_batch(session: Session, batch: Any) -> MiniBatch:
    """Return a mini-batch of a stream, which passes no gradients back to its inputs."""
    inputs, target = microbatches.pair(batch, has_own_loss=session.assembly.settings.has_own_loss)
    minibatch = training_batch(session, inputs, target, {})
    if any(t.requires_grad for part in minibatch.inputs for t in trees.tensors(part)):
        raise BatchError(
            "inputs require gradients, but a stream passes none back to what made them: "
            "detach() them, or make that a layer"
        )
    return minibatch


def _minibatch(session: Session, given: dict[str, Any], sizes: list[int]) -> MiniBatch:
    layers = session.assembly.layout.layers
    with torch.enable_grad():  # inputs may come from a graph of the caller's
        cut = microbatches.cut(given, sizes)
        parts = [microbatch_inputs(layers, part) for part in cut]
    return _of_parts(session, parts)


def _of_parts(session: Session, parts: Sequence[Mapping[str, Any]]) -> MiniBatch:
    assembly = session.assembly
    first = assembly.collectives.replica * assembly.layout.schedule.num_microbatches
    context = ForwardContext.current()
    if assembly.sharded is not None:  # or the weights that are gathered could not be trained after
        context = replace(context, is_inference=False)
    return MiniBatch([*parts], session.seed, session.num_steps, first, context)


def _sizes(session: Session, *batches: Any) -> list[int]:
    length = microbatches.num_samples(*batches)
    return microbatches.sizes(length, session.assembly.layout.schedule.num_microbatches)


def _weights(
    session: Session,
    sizes: Sequence[int],
    targets: Sequence[Any],
    parts: Sequence[Mapping[str, Any]],
) -> list[float]:
    """Return each micro-batch's weight: its share of samples, or 1 / the total count."""
    settings, replicas = session.assembly.settings, session.assembly.replicas
    if settings.has_own_loss:
        return own_loss_weights(session, sizes, parts)
    if settings.count_fn is None:
        samples = replicas.total(sum(sizes))
        return [size / samples for size in sizes]
    total = replicas.total(sum(float(settings.count_fn(part)) for part in targets))
    return [1.0 / total if total else 0.0] * len(sizes)


def own_loss_weights(
    session: Session, sizes: Sequence[int], parts: Sequence[Mapping[str, Any]]
) -> list[float]:
    """Return the weights of a model's own loss: shares of what it counts, or of samples."""
    recording = session.assembly.layout.layers.recording
    assert recording is not None  # only a recorded model has a loss of its own
    if recording.is_sum(parts[0]):
        return [1.0] * len(sizes)
    counts = recording.loss_counts(parts) or [float(size) for size in sizes]
    total = session.assembly.replicas.total(sum(counts))
    return [count / total if total else 0.0 for count in counts]
