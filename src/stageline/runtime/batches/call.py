"""`pipe(inputs)`: the outputs of a batch, in training as part of the caller's graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from stageline.errors import ModelError
from stageline.model import trees
from stageline.runtime.batches import input_gradients, microbatches
from stageline.runtime.batches.cut_batch import (
    cut_by_caller,
    forward_batch,
    own_loss_weights,
)
from stageline.runtime.batches.joined_output import connect_outputs
from stageline.runtime.engine.minibatch import MiniBatch, Purpose
from stageline.runtime.engine.session import Session

Run = Callable[[MiniBatch, Purpose], None]  # `session.run`, or a function around it
OutputGradients = Sequence[Tensor | None]
# from the gradients of all outputs to those of each micro-batch
CutGradients = Callable[[OutputGradients], Sequence[OutputGradients]]


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
    outputs, have_gradients = _run_forwards(session, minibatch, session.run, is_trained=is_trained)
    weights = _weights(session, minibatch, sizes)
    joined = microbatches.join(outputs, sizes, weights)
    if not is_trained or not any(map(any, have_gradients)):
        return joined
    columns = zip(*map(trees.tensors, outputs), strict=True)
    splits = [microbatches.splitter(column, sizes, weights) for column in columns]

    def cut(gradients: OutputGradients) -> list[OutputGradients]:
        rows = [
            [None] * len(sizes) if gradient is None else split(gradient)
            for gradient, split in zip(gradients, splits, strict=True)
        ]
        return [*zip(*rows, strict=True)]

    have_one = [any(column) for column in zip(*have_gradients, strict=True)]
    return _connected(session, minibatch, joined, have_one, cut, session.run)


def evaluate(
    session: Session, inputs: Any, named: Mapping[str, Any]
) -> tuple[list[Any], list[int]]:
    """Return the output of each micro-batch, on all ranks and without a graph, and their sizes."""
    minibatch, sizes = forward_batch(session, inputs, named)
    outputs, _ = _run_forwards(session, minibatch, session.run, is_trained=False)
    return outputs, sizes


def _weights(session: Session, minibatch: MiniBatch, sizes: list[int]) -> list[float] | None:
    """Return the weights of losses that a recorded model computes itself."""
    if session.assembly.layout.layers.recording is None:
        return None
    return own_loss_weights(session, sizes, minibatch.inputs)


def call_on_parts(session: Session, parts: Sequence[Any], seed: int, run: Run) -> list[Any]:
    """Return the output of each micro-batch, for micro-batches that the caller has cut.

    They are part of the caller's graph in evaluation too, unless gradients are disabled. Random
    numbers depend on `seed`, and not on the number of steps.
    """
    is_trained = torch.is_grad_enabled()
    minibatch = cut_by_caller(session, parts, seed)
    outputs, have_gradients = _run_forwards(session, minibatch, run, is_trained=is_trained)
    if not is_trained or not any(map(any, have_gradients)):
        return outputs

    def cut(gradients: OutputGradients) -> list[OutputGradients]:
        remaining = iter(gradients)
        return [[*islice(remaining, len(row))] for row in have_gradients]

    have_one = [has_one for row in have_gradients for has_one in row]
    connected: list[Any] = _connected(session, minibatch, outputs, have_one, cut, run)
    return connected


def _run_forwards(
    session: Session, minibatch: MiniBatch, run: Run, *, is_trained: bool
) -> tuple[list[Any], list[list[bool]]]:
    """Return the outputs of the last stage, on all ranks, and which tensors have gradients."""
    run(minibatch, Purpose.FILL if is_trained else Purpose.EVALUATE)
    session.num_steps += is_trained
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
    outputs: Any,
    have_gradients: Sequence[bool],
    cut: CutGradients,
    run: Run,
) -> Any:
    """Return outputs as part of the caller's graph: their gradients drain the pipeline."""
    assembly, has_run = session.assembly, list[bool]()

    def drain(gradients: OutputGradients) -> list[Tensor | None]:
        _check_graph(session.assembly is assembly, has_run)
        minibatch.output_gradients = [
            {assembly.layout.layers.output: list(row)} for row in cut(gradients)
        ]
        run(minibatch, Purpose.DRAIN)
        input_gradients.share(minibatch, assembly.collectives)
        return [gradient for _, gradient in input_gradients.of_inputs(minibatch)]

    inputs = [t for part in minibatch.inputs for t in trees.tensors(part) if t.requires_grad]
    weights = [p for p in assembly.layout.parameters() if p.requires_grad and not p.is_meta]
    fresh = iter(connect_outputs(trees.tensors(outputs), have_gradients, inputs, weights, drain))
    return trees.map_leaves(lambda leaf: next(fresh) if isinstance(leaf, Tensor) else leaf, outputs)


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
