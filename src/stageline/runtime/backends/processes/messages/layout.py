"""What each message holds: its values in order, and their tensors in one buffer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from stageline.model import trees
from stageline.model.layers import Value
from stageline.runtime.backends.processes.messages import packing as wire
from stageline.runtime.backends.processes.messages.shapes import TensorSpec, ValueSpec


@dataclass(frozen=True)
class MessageLayout:
    """The values of one kind of message, in order."""

    is_forward: bool
    values: tuple[Value, ...]
    shapes: tuple[ValueSpec, ...] | None  # None: they depend on data

    @cached_property
    def packing(self) -> wire.Packing:
        assert self.shapes is not None
        forms = wire.specs_of_values(self.shapes)
        return wire.Packing.of(forms if self.is_forward else list(map(_of_gradient, forms)))

    @cached_property
    def is_lone(self) -> bool:
        """Return whether it is one tensor that is not in a tree, as most messages are."""
        if self.shapes is None or len(self.shapes) != 1:
            return False
        return self.shapes[0].tree.type is None and len(self.shapes[0].tensor_specs) == 1

    def tensors(self, contents: Mapping[Value, Any]) -> list[Tensor | None]:
        if self.is_lone:
            content = contents[self.values[0]]
            if not self.is_forward:
                gradients: list[Tensor | None] = content
                return gradients
            if isinstance(content, Tensor):
                return [content]
        if self.is_forward:
            return list(wire.tensors_of_values(contents, self.values, self.shapes))
        return [tensor for value in self.values for tensor in contents[value]]

    def places(self, contents: Mapping[Value, Any]) -> list[tuple[Value, int]]:
        """Return for each tensor of a message of values its value, and its position there."""
        return [
            (value, position)
            for value in self.values
            for position in range(len(trees.tensors(contents[value])))
        ]

    def contents(self, tensors: Sequence[Tensor | None]) -> dict[Value, Any]:
        assert self.shapes is not None
        if self.is_lone:
            return {self.values[0]: tensors[0] if self.is_forward else list(tensors)}
        if self.is_forward:
            return wire.rebuild_values(tensors, self.values, self.shapes)
        rest = iter(tensors)
        return {
            value: [next(rest) for _ in shape.tensor_specs]
            for value, shape in zip(self.values, self.shapes, strict=True)
        }


def _of_gradient(form: TensorSpec) -> TensorSpec:
    """Return the form of a tensor's gradient: what has none takes no space."""
    has_gradient = form.dtype.is_floating_point or form.dtype.is_complex
    return form if has_gradient else form._replace(shape=(0,), stride=(1,))
