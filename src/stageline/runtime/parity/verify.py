"""`pipe.verify`: compare a step of a pipeline, bit for bit, with a plain loop."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor

from stageline.errors import ModelError, ParityError
from stageline.model.inputs import batch_inputs
from stageline.runtime.backends.backend import Collectives
from stageline.runtime.batches import microbatches
from stageline.runtime.batches.cut_batch import training_batch
from stageline.runtime.devices import watching_caller
from stageline.runtime.engine.minibatch import MiniBatch, Purpose
from stageline.runtime.engine.session import Session
from stageline.runtime.parity.plain_loop import (
    StepOutcome,
    detached_copy,
    first_difference,
    plain_step,
    preserved_model,
    without_gradients,
)
from stageline.runtime.placement.layout import Layout


def verify(session: Session, inputs: Any, target: Any, named: Mapping[str, Any]) -> None:
    """Raise `ParityError` unless a step on this batch has the bits of a plain loop."""
    assembly = session.assembly
    layers, collectives = assembly.layout.layers, assembly.collectives
    if assembly.is_asynchronous:
        raise ModelError(
            f"verify was called, but {assembly.layout.schedule.name!r} does not give the numbers "
            "of a plain loop, by design: verify a synchronous schedule of the same model"
        )
    session.check_idle()
    inputs, target, named = detached_copy((inputs, target, dict(named)))
    if any(parameter.is_meta for parameter in layers.modules.parameters()):
        raise ModelError(
            "a part of the model is on the meta device, but verify needs the whole of it here: "
            "build it on the CPU, with fewer or smaller layers, and verify before a replan"
        )
    if assembly.sharded is not None:
        raise ModelError(
            "weights are sharded by fully_shard, but verify needs the whole model here: verify a "
            "pipeline of the same model before fully_shard is called"
        )
    broadcast_state(assembly.layout, collectives)
    with assembly.replicas.isolated():
        found = _difference(session, inputs, target, named)
    differences = collectives.gather(found, "what verify found")
    if difference := next((text for text in differences if text is not None), None):
        raise ParityError(difference)


def broadcast_state(layout: Layout, collectives: Collectives) -> None:
    """Give every process the parameters and buffers of all layers."""
    for layer, rank in zip(layout.layers, layout.rank_of_layer, strict=True):
        tensors = [*layer.module.parameters(), *layer.module.buffers()]
        found = collectives.broadcast([t.detach() for t in tensors], rank, "the model")
        if not collectives.has(rank):
            for tensor, new in zip(tensors, found, strict=True):
                tensor.data.copy_(new)


def _difference(session: Session, inputs: Any, target: Any, named: Mapping[str, Any]) -> str | None:
    """Compare a step of the pipeline with a plain loop over the same layers."""
    layout, settings = session.assembly.layout, session.assembly.settings
    outside: dict[Tensor, Tensor | None] = {}  # weights of the loss, say, and their gradients
    try:
        with preserved_model(layout.layers, settings.loss_fn):
            given = detached_copy((inputs, target, named))
            expected = training_batch(session, *given)
            is_intercepted = partial(_is_caught, session, expected.number)
            modes = settings.batch_norm, settings.accumulate
            calls = _calls(session, given[0], given[2], expected)
            plain_step(layout.layers, expected, *modes, is_intercepted, outside, calls)
            wanted = StepOutcome.of(layout.layers, expected, outside)
        with (
            preserved_model(layout.layers, settings.loss_fn),
            without_gradients(outside),
            watching_caller(layout.accelerators),
        ):
            minibatch = training_batch(session, inputs, target, named)
            session.run(minibatch, Purpose.TRAIN)
            found = StepOutcome.of(layout.layers, minibatch, outside)
    finally:
        for leaf, gradient in outside.items():
            leaf.grad = gradient
    stages = [numbers if layout.is_here(numbers[0]) else range(0) for numbers in layout.stages]
    return first_difference(layout.layers, found, wanted, stages)


def _calls(
    session: Session, inputs: Any, named: Mapping[str, Any], minibatch: MiniBatch
) -> list[Any]:
    """Return the inputs of each micro-batch, in the form of a recorded model's own forward."""
    layers = session.assembly.layout.layers
    if layers.recording is None:
        return []
    given = batch_inputs(layers, inputs, named)
    sizes = microbatches.sizes(microbatches.num_samples(given), len(minibatch.inputs))
    return microbatches.cut(given, sizes)


def _is_caught(session: Session, step: int, layer: int) -> bool:
    """Return whether gradients of a layer, or of the loss if it is -1, may wait or be fused."""
    stages = session.assembly.stages
    stage = next((stage for stage in stages if layer in stage.numbers), stages[-1])
    return stage.is_intercepted(layer, step)
