"""Predict the shapes of messages from those of a batch: layers run on tensors without data.

Every rank does this for itself, so shapes need not be sent. A layer whose output shape depends on
data ends the prediction: from there on the sender sends the shapes as well.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stageline.errors import ModelError
from stageline.model import trees
from stageline.model.layers import INPUT, Layer, LayerSequence, Value
from stageline.runtime.backends.processes.messages import encoding
from stageline.runtime.exactness.caller_context import ForwardContext
from stageline.torch_private import FakeTensorMode


class TensorSpec(NamedTuple):
    """Shape, dtype and strides of a tensor. The last bits of a product depend on the strides."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...]

    @staticmethod
    def of(tensor: Tensor) -> TensorSpec:
        """Return the spec of a copy of the tensor: a transposed one stays transposed."""
        copied = torch.empty_like(tensor, device="meta")
        return TensorSpec(tuple(tensor.shape), tensor.dtype, copied.stride())

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * int(torch.Size(self.shape).numel())


class ValueSpec(NamedTuple):
    """A tree of values with a `TensorSpec` for each tensor; other leaves are kept."""

    leaves: tuple[Any, ...]
    tree: trees.Spec

    @staticmethod
    def of(value: Any) -> ValueSpec:
        leaves, tree = trees.flatten(value)
        specs = (TensorSpec.of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        return ValueSpec(tuple(specs), tree)

    @property
    def description(self) -> tuple[tuple[Any, ...], str]:
        """The spec in plain values that can be sent to another rank."""
        return self.leaves, encoding.spec_to_text(self.tree)

    @staticmethod
    def from_description(description: tuple[tuple[Any, ...], str]) -> ValueSpec:
        leaves, tree = description
        return ValueSpec(tuple(leaves), encoding.spec_from_text(tree))

    @property
    def tensor_specs(self) -> tuple[TensorSpec, ...]:
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, TensorSpec))

    @property
    def has_only_tensors(self) -> bool:
        """Return whether all leaves are tensors or None."""
        return all(leaf is None or isinstance(leaf, TensorSpec) for leaf in self.leaves)

    def tensors(self, value: Any) -> list[Tensor]:
        """Return the tensors of a value; raise `ModelError` if it does not match this spec."""
        leaves, tree = trees.flatten(value)
        found = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if tree != self.tree or len(found) != len(self.tensor_specs):
            raise ModelError(
                f"a {type(value).__name__} to be sent has another structure than predicted from "
                "the batch's shapes: a layer must return the same structure in every step, with "
                "tensors and None always in the same places"
            )
        return found

    def rebuild(self, tensors: Iterable[Tensor | None]) -> Any:
        """Return a value of this spec with the given tensors."""
        rest = iter(tensors)
        leaves = [next(rest) if isinstance(leaf, TensorSpec) else leaf for leaf in self.leaves]
        return trees.unflatten(leaves, self.tree)


class PredictedSpecs(NamedTuple):
    """The specs of a batch's values before it runs."""

    specs: dict[Value, ValueSpec]
    unpredictable_from: str  # the first layer that needs data, and why; empty if there is none


def predict_specs(
    layers: LayerSequence,
    inputs: Mapping[str, Any],
    ambient: ForwardContext,
    device: torch.device | None = None,
) -> PredictedSpecs:
    """Return the specs of all values up to the first layer that needs data.

    Layers of other ranks are not here, and inputs may be on the host: all of it is taken to be on
    `device`, or where it is.
    """
    found: dict[Value, ValueSpec] = {}
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with ExitStack() as around:
        around.enter_context(_without_log())
        ambient.enter(around, grad=False)
        around.enter_context(mode)
        values = {Value(INPUT, name): _fake(value, device) for name, value in inputs.items()}
        for name, value in inputs.items():
            found[Value(INPUT, name)] = _gradient_spec(ValueSpec.of(value), value)
        for number, layer in enumerate(layers.layers):
            given = [values[source] for source in layers.sources[number]]
            try:
                result = _fake_copy(layer, device)(*given)
            except Exception as error:  # if it is a mistake, the real forward raises it as well
                reason = f"layer {layer.name!r}: {type(error).__name__}: {error}"
                return PredictedSpecs(found, reason)
            results = layer.written(result)
            for name, written in zip(layer.writes, results, strict=True):
                values[Value(number, name)] = written
                spec = ValueSpec.of(written)
                if spec.has_only_tensors:  # other values may change from step to step
                    found[Value(number, name)] = spec
    return PredictedSpecs(found, "")


@contextmanager
def _without_log() -> Iterator[None]:
    """Keep torch from logging a stack of calls for each operator that needs data."""
    log = logging.getLogger(FakeTensorMode.__module__)
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _gradient_spec(spec: ValueSpec, value: Any) -> ValueSpec:
    """Return the spec of an input's gradients: empty tensors where it needs none.

    The inputs themselves are on all ranks and never sent.
    """
    tensors = iter(trees.tensors(value))
    empty = TensorSpec((0,), torch.float32, (1,))
    leaves = (
        leaf if not isinstance(leaf, TensorSpec) or next(tensors).requires_grad else empty
        for leaf in spec.leaves
    )
    return spec._replace(leaves=tuple(leaves))


def _fake_copy(layer: Layer, device: torch.device | None) -> torch.nn.Module:
    """Return a copy without data, so that a forward cannot change the module itself."""
    memo = {id(tensor): _fake(tensor, device) for tensor in _tensors(layer.module)}
    return copy.deepcopy(layer.module, memo)


def _tensors(module: torch.nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _fake(tree: Any, device: torch.device | None) -> Any:
    """Return a tree of tensors without data; call it inside a FakeTensorMode."""
    return trees.map_leaves(
        lambda item: _empty(item, device) if isinstance(item, Tensor) else item, tree
    )


def _empty(tensor: Tensor, device: torch.device | None) -> Tensor:
    """Return a tensor without data; one on the meta device is on the CPU of another process."""
    where = device or ("cpu" if tensor.is_meta else tensor.device)
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=where)
