"""`pipe(inputs)`: the outputs of a batch, in training as part of the caller's graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stageline.errors import ModelError
from stageline.runtime import trees
from stageline.runtime.batches import input_gradients, microbatches
from stageline.runtime.batches.cut_batch import forward_batch
from stageline.runtime.batches.joined_output import connect_outputs
from stageline.runtime.engine.minibatch import MiniBatch, Purpose
from stageline.runtime.engine.session import Session


def call(session: Session, inputs: Any, named: Mapping[str, Any]) -> Any:
    """Return the outputs of all micro-batches, joined in the model's own containers."""
    assembly = session.assembly
    layout = assembly.layout
    is_trained = torch.is_grad_enabled() and any(layer.module.training for layer in layout.layers)
    if is_trained and assembly.is_asynchronous:
        raise ModelError(
            f"the pipeline was called in training, but {layout.schedule.name!r} needs its loss: "
            "use pipe.run(loader), or pipe.eval() for outputs"
        )
    minibatch, sizes = forward_batch(session, inputs, named)
    session.run(minibatch, Purpose.FILL if is_trained else Purpose.EVALUATE)
    session.num_steps += is_trained
    outputs, have_gradients = _outputs(session, minibatch)
    if is_trained and any(map(any, have_gradients)):
        return _connected(session, minibatch, outputs, have_gradients, sizes)
    return microbatches.join(outputs, sizes)


def _outputs(session: Session, minibatch: MiniBatch) -> tuple[list[Any], list[list[bool]]]:
    """Return the outputs of the last stage, on all ranks, and which tensors have gradients."""
    made = None
    if minibatch.outputs:
        made = [minibatch.outputs[i] for i in range(len(minibatch.inputs))]
    have_gradients = [[t.requires_grad for t in trees.tensors(output)] for output in made or ()]
    plain = trees.map_leaves(trees.detached, made)
    collectives, schedule = session.assembly.collectives, session.assembly.layout.schedule
    found: tuple[list[Any], list[list[bool]]] = collectives.broadcast(
        (plain, have_gradients), schedule.placement[-1], "the output"
    )
    return found


def _connected(
    session: Session,
    minibatch: MiniBatch,
    outputs: list[Any],
    have_gradients: list[list[bool]],
    sizes: list[int],
) -> Any:
    """Return the joined outputs as part of the caller's graph: their gradients drain it."""
    joined = microbatches.join(outputs, sizes)
    columns = zip(*map(trees.tensors, outputs), strict=True)
    splits = [microbatches.splitter(column, sizes) for column in columns]
    assembly, has_run = session.assembly, list[bool]()

    def drain(gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        _check_graph(session.assembly is assembly, has_run)
        rows = [
            [None] * len(sizes) if gradient is None else split(gradient)
            for gradient, split in zip(gradients, splits, strict=True)
        ]
        minibatch.output_gradients = [
            {assembly.layout.layers.output: list(row)} for row in zip(*rows, strict=True)
        ]
        session.run(minibatch, Purpose.DRAIN)
        input_gradients.share(minibatch, assembly.collectives)
        return [gradient for _, gradient in input_gradients.of_inputs(minibatch)]

    inputs = [t for part in minibatch.inputs for t in trees.tensors(part) if t.requires_grad]
    weights = [p for p in assembly.layout.parameters() if p.requires_grad and not p.is_meta]
    have_one = [any(column) for column in zip(*have_gradients, strict=True)]
    fresh = iter(connect_outputs(trees.tensors(joined), have_one, inputs, weights, drain))
    return trees.map_leaves(lambda leaf: next(fresh) if isinstance(leaf, Tensor) else leaf, joined)


def _check_graph(is_in_place: bool, has_run: list[bool]) -> None:
    """Raise if a forward's graph is gone; note that it is now."""
    if has_run:
        raise ModelError("backward ran twice through one output, but its graph is gone")
    if not is_in_place:
        raise ModelError(
            "layers moved between a forward and its backward, and the graph is gone: call replan "
            "after backward()"
        )
    has_run.append(True)
