"""A model as a sequence of layers, each naming the values it reads and writes.

    tokens ─► embed ─► x ─► block ─► x ─► block ─► x ─► head ─► x
                            mask ─┴────────┘

A chain is the trivial case: every layer reads and writes `x`. A skip is a value that is written by
one layer and read by a later one, with another name.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from torch import nn
from torch.nn.parameter import is_lazy

from stageline.errors import ModelError
from stageline.torch_private import child_table, has_hooks

CHAIN = "x"  # the value that a chain passes on
INPUT = -1  # stands for the loader where a layer's number is asked for


@dataclass(frozen=True)
class Layer:
    """The smallest piece that is never cut: a module, the values it reads and those it writes.

    The module is called with the values of `reads`, in that order. If it writes several, it returns
    a tuple of them.
    """

    name: str
    module: nn.Module
    reads: tuple[str, ...] = (CHAIN,)
    writes: tuple[str, ...] = (CHAIN,)

    def __post_init__(self) -> None:
        given: dict[str, Any] = {"reads": self.reads, "writes": self.writes}
        for what, names in given.items():
            if isinstance(names, str) or not all(isinstance(name, str) for name in names):
                raise ModelError(
                    f"layer {self.name!r} {what} {names!r}, but this has to be a tuple of names, "
                    "such as ('x',)"
                )

    def written(self, result: Any) -> tuple[Any, ...]:
        """What it returned, as a value for each name that it writes."""
        if len(self.writes) == 1:
            return (result,)
        if not isinstance(result, tuple | list) or len(result) != len(self.writes):
            found = f"{len(result)} values" if isinstance(result, tuple | list) else "one value"
            raise ModelError(
                f"layer {self.name!r} returned {found}, but writes {', '.join(self.writes)}: "
                "return a tuple with one for each"
            )
        return tuple(result)


class Value(NamedTuple):
    """A value by who wrote it: the number of a layer, or INPUT, and its name there."""

    writer: int
    name: str


@dataclass(frozen=True)
class LayerSequence:
    """Layers in the order in which they run.

    >>> layers = LayerSequence.of(nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.ReLU())))
    >>> [layer.name for layer in layers.layers]
    ['0', '1.0']
    >>> layers.sources[1]
    (Value(writer=0, name='x'),)
    """

    layers: tuple[Layer, ...]
    containers: tuple[nn.Module, ...] = field(
        default=(), compare=False
    )  # that they were taken from

    @staticmethod
    def of(model: LayerSequence | nn.Module | Iterable[Layer | nn.Module]) -> LayerSequence:
        """From an `nn.Sequential`, nested ones flattened, or from a list of layers or modules."""
        layers = model if isinstance(model, LayerSequence) else LayerSequence._of(model)
        for layer in layers:
            _check_shapes(layer)
        return layers

    @staticmethod
    def _of(model: nn.Module | Iterable[Layer | nn.Module]) -> LayerSequence:
        if isinstance(model, nn.Module) and _is_plain_sequential(model):
            return LayerSequence(tuple(_flattened("", model)), (model,))
        if isinstance(model, nn.Module):
            raise ModelError(
                f"the model is a {type(model).__name__}, but a pipeline needs to know its layers: "
                "give an nn.Sequential, or a list of sl.Layer"
            )
        if not isinstance(model, Iterable):
            raise ModelError(f"the model is {model!r}, but has to be an nn.Sequential or a list")
        given = list(model)
        containers = tuple(item for item in given if isinstance(item, nn.Module))
        return LayerSequence(tuple(_named(given)), containers)

    def __post_init__(self) -> None:
        """Parameters are saved, and randomness is drawn, by the names of layers."""
        names = [layer.name for layer in self.layers]
        for name in names:
            if names.count(name) > 1:
                raise ModelError(f"{names.count(name)} layers are called {name!r}: name them apart")

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[Layer]:
        return iter(self.layers)

    @cached_property
    def modules(self) -> nn.ModuleList:
        """Of all layers."""
        return nn.ModuleList(layer.module for layer in self.layers)

    def train(self, mode: bool = True) -> None:
        """Switch all layers to training or evaluation, and the containers that they came in."""
        for module in (*self.containers, *self.modules):
            module.train(mode)

    def state_dict(self) -> dict[str, Any]:
        """Parameters and buffers under the names that they have in the model."""
        return {
            f"{layer.name}.{name}": tensor
            for layer in self.layers
            for name, tensor in layer.module.state_dict().items()
        }

    def copy(self) -> LayerSequence:
        """The same layers with modules of their own, without gradients."""
        modules = copy.deepcopy(self.modules)
        modules.zero_grad()
        pairs = zip(self.layers, modules, strict=True)
        return LayerSequence(tuple(replace(layer, module=module) for layer, module in pairs))

    @cached_property
    def sources(self) -> tuple[tuple[Value, ...], ...]:
        """For each layer what it reads: of several values with a name, the last one before it."""
        latest: dict[str, Value] = {}
        sources = []
        for number, layer in enumerate(self.layers):
            reads = (latest.get(name, Value(INPUT, name)) for name in layer.reads)
            sources.append(tuple(reads))
            latest |= {name: Value(number, name) for name in layer.writes}
        return tuple(sources)

    @property
    def output(self) -> Value:
        """What the last layer wrote first: the loss is of this."""
        return Value(len(self) - 1, self.layers[-1].writes[0])


def _check_shapes(layer: Layer) -> None:
    """Raise if a weight gets its shape only from the first batch: ranks need to know it before."""
    weights = (*layer.module.named_parameters(), *layer.module.named_buffers())
    for name, weight in weights:
        if is_lazy(weight):
            raise ModelError(
                f"'{layer.name}.{name}' has no shape yet, because its module is lazy: run the "
                "model once on a sample before, or give its sizes"
            )


def _flattened(prefix: str, module: nn.Module) -> Iterable[Layer]:
    if not _is_plain_sequential(module):
        yield Layer(prefix, module)
        return
    for name, child in child_table(module).items():
        assert child is not None  # a Sequential has none
        yield from _flattened(f"{prefix}.{name}" if prefix else name, child)


def _is_plain_sequential(module: nn.Module) -> bool:
    """One that only runs its children: no forward of its own, and no hooks that see the whole."""
    is_plain = type(module).forward is nn.Sequential.forward
    return is_plain and not has_hooks(module)


def _named(layers: Iterable[Layer | nn.Module]) -> Iterable[Layer]:
    for number, layer in enumerate(layers):
        if isinstance(layer, Layer):
            yield layer
        elif not isinstance(layer, nn.Module):
            raise ModelError(f"layer {number} is {layer!r}, but has to be a module or a sl.Layer")
        else:
            yield from _flattened(str(number), layer)
