"""What messages look like, from the shapes of a batch alone: layers run on tensors without data.

Every rank works this out for itself, so nobody has to be told what to expect. A layer whose output
depends on data ends it: from there on the sender has to say what comes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stageline.errors import ModelError
from stageline.model.layers import INPUT, Layer, LayerSequence, Value
from stageline.runtime import trees
from stageline.runtime.backends.processes import encoding
from stageline.runtime.exactness.caller_context import ForwardContext
from stageline.torch_private import FakeTensorMode


class Form(NamedTuple):
    """A tensor without its data. Its strides count: a product's last bits depend on them."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...]

    @staticmethod
    def of(tensor: Tensor) -> Form:
        """As a copy of the tensor would be: a transposed one stays transposed."""
        copied = torch.empty_like(tensor, device="meta")
        return Form(tuple(tensor.shape), tensor.dtype, copied.stride())

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * int(torch.Size(self.shape).numel())


class Shape(NamedTuple):
    """A value without its data: a form for each tensor, everything else as it is."""

    leaves: tuple[Any, ...]
    tree: trees.Spec

    @staticmethod
    def of(value: Any) -> Shape:
        leaves, tree = trees.flatten(value)
        return Shape(
            tuple(Form.of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves), tree
        )

    @property
    def described(self) -> tuple[tuple[Any, ...], str]:
        """In plain values, for another rank."""
        return self.leaves, encoding.spec_text(self.tree)

    @staticmethod
    def from_description(description: tuple[tuple[Any, ...], str]) -> Shape:
        leaves, tree = description
        return Shape(tuple(leaves), encoding.spec_of(tree))

    @property
    def forms(self) -> tuple[Form, ...]:
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, Form))

    @property
    def is_of_tensors(self) -> bool:
        """Whether there is nothing in it but tensors, and None."""
        return all(leaf is None or isinstance(leaf, Form) for leaf in self.leaves)

    def tensors(self, value: Any) -> list[Tensor]:
        """Of a value of this shape; raises if it is another than was foreseen."""
        leaves, tree = trees.flatten(value)
        found = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if tree != self.tree or len(found) != len(self.forms):
            raise ModelError(
                f"a {type(value).__name__} is to be sent that has other parts than the one that "
                "follows from the batch's shapes: a layer has to return the same structure in "
                "every step, with a tensor or None always in the same places"
            )
        return found

    def around(self, tensors: Iterable[Tensor | None]) -> Any:
        """The value again, with a tensor for each form."""
        rest = iter(tensors)
        leaves = [next(rest) if isinstance(leaf, Form) else leaf for leaf in self.leaves]
        return trees.unflatten(leaves, self.tree)


class Foreseen(NamedTuple):
    """What is known of a batch's values before it runs."""

    shapes: dict[Value, Shape]
    end: str  # which layer could not be run without data, and why; empty if all could


def value_shapes(
    layers: LayerSequence, inputs: Mapping[str, Any], ambient: ForwardContext
) -> Foreseen:
    """Of all values up to the first layer that needs data."""
    found: dict[Value, Shape] = {}
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with ExitStack() as around:
        ambient.enter(around, grad=False)
        around.enter_context(mode)
        values = {Value(INPUT, name): _fake(value) for name, value in inputs.items()}
        for name, value in inputs.items():
            found[Value(INPUT, name)] = _gradients(Shape.of(value), value)
        for number, layer in enumerate(layers.layers):
            given = [values[source] for source in layers.sources[number]]
            try:
                result = _fake_copy(layer)(*given)
            except Exception as error:  # whatever it is, it will be told where it matters
                return Foreseen(found, f"layer {layer.name!r}: {type(error).__name__}: {error}")
            results = layer.written(result)
            for name, written in zip(layer.writes, results, strict=True):
                values[Value(number, name)] = written
                shape = Shape.of(written)
                if shape.is_of_tensors:  # other values may change from step to step
                    found[Value(number, name)] = shape
    return Foreseen(found, "")


def _gradients(shape: Shape, value: Any) -> Shape:
    """Of what the loader brings, only gradients are sent: none, if it needs none."""
    tensors = iter(trees.tensors(value))
    empty = Form((0,), torch.float32, (1,))
    leaves = (
        leaf if not isinstance(leaf, Form) or next(tensors).requires_grad else empty
        for leaf in shape.leaves
    )
    return shape._replace(leaves=tuple(leaves))


def _fake_copy(layer: Layer) -> torch.nn.Module:
    """A copy takes the changes that a forward makes to its module."""
    memo = {id(tensor): _fake(tensor) for tensor in _tensors(layer.module)}
    return copy.deepcopy(layer.module, memo)


def _tensors(module: torch.nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _fake(tree: Any) -> Any:
    """Called inside of a FakeTensorMode, where new tensors have no data."""
    return trees.map_leaves(lambda item: _empty(item) if isinstance(item, Tensor) else item, tree)


def _empty(tensor: Tensor) -> Tensor:
    """One on the meta device belongs to a layer that is elsewhere, where it is not."""
    device = "cpu" if tensor.is_meta else tensor.device
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
