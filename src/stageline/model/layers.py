"""A model as a sequence of layers, each naming the values it reads and writes.

    tokens ─► embed ─► x ─► block ─► x ─► block ─► x ─► head ─► x
                            mask ─┴────────┘

A chain is the trivial case: every layer reads and writes `x`. A skip connection is a value of
another name, written by one layer and read by a later one.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from torch import nn
from torch.nn.parameter import is_lazy

from stageline.arguments import shown
from stageline.errors import ModelError
from stageline.torch_private import child_table, has_hooks

CHAIN = "x"  # the name of the value in a chain
INPUT = -1  # in place of a layer's number, for values that come with the batch


@dataclass(frozen=True)
class Layer:
    """A module with the names of the values it reads and writes; a layer is never split.

    The module is called with the values of `reads`, in that order. If it writes several values, it
    returns a tuple of them. Its parameters are called `<name>.<name in the module>`, unless
    `has_full_names`: then the module itself names them as the whole model does.
    """

    name: str
    module: nn.Module
    reads: tuple[str, ...] = (CHAIN,)
    writes: tuple[str, ...] = (CHAIN,)
    has_full_names: bool = False

    def __post_init__(self) -> None:
        given: dict[str, Any] = {"reads": self.reads, "writes": self.writes}
        for what, names in given.items():
            if isinstance(names, str) or not all(isinstance(name, str) for name in names):
                raise ModelError(
                    f"layer {self.name!r} {what} {names!r}, but this has to be a tuple of names, "
                    "such as ('x',)"
                )

    def full_name(self, *names: str) -> str:
        """Return the name in the whole model of something that has this name in the module.

        >>> Layer("blocks.1", nn.Linear(2, 2)).full_name("weight")
        'blocks.1.weight'
        """
        parts = names if self.has_full_names else (self.name, *names)
        return ".".join(part for part in parts if part)

    def written(self, result: Any) -> tuple[Any, ...]:
        """Return the module's result as a tuple with one value per name in `writes`."""
        if len(self.writes) == 1:
            return (result,)
        if not isinstance(result, tuple | list) or len(result) != len(self.writes):
            found = f"{len(result)} values" if isinstance(result, tuple | list) else "one value"
            raise ModelError(
                f"layer {self.name!r} returned {found}, but writes {', '.join(self.writes)}: "
                "return a tuple with one value for each"
            )
        return tuple(result)


class Value(NamedTuple):
    """A value between layers: the number of the layer that writes it, or INPUT, and its name."""

    writer: int
    name: str


class ValueSize(NamedTuple):
    """The shape and the bytes of a value, as they were recorded."""

    shape: str
    num_bytes: int


class RecordedForward(Protocol):
    """A recorded model: from a micro-batch in the form of its forward to what its layers read."""

    def prepare(self, inputs: Any, named: Mapping[str, Any]) -> dict[str, Any]: ...

    def update_model(self) -> None: ...

    def loss_counts(self, parts: Sequence[Mapping[str, Any]]) -> list[float] | None: ...

    def is_sum(self, part: Mapping[str, Any]) -> bool: ...

    def value_sizes(self) -> dict[str, ValueSize]: ...

    @property
    def has_own_loss(self) -> bool: ...


@dataclass(frozen=True)
class LayerSequence:
    """The layers of a model, in the order in which they run.

    >>> layers = LayerSequence.of(nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.ReLU())))
    >>> [layer.name for layer in layers.layers]
    ['0', '1.0']
    >>> layers.sources[1]
    (Value(writer=0, name='x'),)
    """

    layers: tuple[Layer, ...]
    # The modules that the layers were taken from.
    containers: tuple[nn.Module, ...] = field(default=(), compare=False)
    # The first name in the model of parameters that have several.
    first_names: Mapping[str, str] = field(default_factory=dict, compare=False)
    recording: RecordedForward | None = field(default=None, compare=False)

    @staticmethod
    def of(model: LayerSequence | nn.Module | Iterable[Layer | nn.Module]) -> LayerSequence:
        """Return the layers of an `nn.Sequential`, flattened, or of a list of layers or modules."""
        layers = model if isinstance(model, LayerSequence) else LayerSequence._of(model)
        for layer in layers:
            _check_shapes(layer)
        return layers

    @staticmethod
    def _of(model: nn.Module | Iterable[Layer | nn.Module]) -> LayerSequence:
        if isinstance(model, nn.Module) and is_plain_sequential(model):
            return LayerSequence(tuple(_flattened("", model)), (model,))
        if isinstance(model, nn.Module):
            raise ModelError(
                f"the model is a {type(model).__name__}, but a pipeline needs to know its layers: "
                "give an nn.Sequential, or a list of sl.Layer"
            )
        if not isinstance(model, Iterable):
            raise ModelError(_no_model(model))
        given = list(model)
        containers = tuple(item for item in given if isinstance(item, nn.Module))
        return LayerSequence(tuple(_named(given)), containers)

    def __post_init__(self) -> None:
        """Raise if names repeat: they identify saved parameters and seed randomness."""
        names = [layer.name for layer in self.layers]
        for name in names:
            if names.count(name) > 1:
                raise ModelError(
                    f"{names.count(name)} layers are called {name!r}: give each its own name"
                )

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[Layer]:
        return iter(self.layers)

    @cached_property
    def modules(self) -> nn.ModuleList:
        """The modules of all layers."""
        return nn.ModuleList(layer.module for layer in self.layers)

    @cached_property
    def shared_modules(self) -> frozenset[nn.Module]:
        """The modules that several layers have."""
        seen: set[nn.Module] = set()
        shared: set[nn.Module] = set()
        for layer in self.layers:
            own = set(layer.module.modules())
            shared |= own & seen
            seen |= own
        return frozenset(shared)

    def train(self, mode: bool = True) -> None:
        """Set training or eval mode on all layers and the modules they were taken from."""
        for module in (*self.containers, *self.modules):
            module.train(mode)

    def state_dict(self) -> dict[str, Any]:
        """Return parameters and buffers by their names in the model."""
        return {
            layer.full_name(name): tensor
            for layer in self.layers
            for name, tensor in layer.module.state_dict().items()
        }

    def copy(self) -> LayerSequence:
        """Return the layers with copies of their modules, without gradients."""
        modules = copy.deepcopy(self.modules)
        modules.zero_grad()
        return self.with_modules(modules)

    def with_modules(self, modules: Iterable[nn.Module]) -> LayerSequence:
        """Return the layers with other modules in the place of theirs."""
        pairs = zip(self.layers, modules, strict=True)
        layers = tuple(replace(layer, module=module) for layer, module in pairs)
        return replace(self, layers=layers, containers=())

    @cached_property
    def sources(self) -> tuple[tuple[Value, ...], ...]:
        """The values that each layer reads: the latest of each name before it."""
        latest: dict[str, Value] = {}
        sources = []
        for number, layer in enumerate(self.layers):
            reads = (latest.get(name, Value(INPUT, name)) for name in layer.reads)
            sources.append(tuple(reads))
            latest |= {name: Value(number, name) for name in layer.writes}
        return tuple(sources)

    @property
    def output(self) -> Value:
        """The first value that the last layer writes; the loss is computed from it."""
        return Value(len(self) - 1, self.layers[-1].writes[0])


def _check_shapes(layer: Layer) -> None:
    """Raise if a lazy module has a weight without a shape: ranks need it before the first batch."""
    weights = (*layer.module.named_parameters(), *layer.module.named_buffers())
    for name, weight in weights:
        if is_lazy(weight):
            raise ModelError(
                f"{layer.full_name(name)!r} has no shape yet, because its module is lazy: run the "
                "model once on example inputs first, or give its sizes"
            )


def _flattened(prefix: str, module: nn.Module) -> Iterable[Layer]:
    if not is_plain_sequential(module):
        yield Layer(prefix, module)
        return
    for name, child in child_table(module).items():  # named_children() drops repeats
        assert child is not None  # a Sequential has no empty children
        yield from _flattened(f"{prefix}.{name}" if prefix else name, child)


def is_plain_sequential(module: nn.Module) -> bool:
    """Return whether a module only runs its children: no forward of its own and no hooks."""
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


def _no_model(given: object) -> str:
    """Return why this is no model, and what to give instead."""
    if isinstance(given, type):
        return f"the model is the class {given.__name__}: give an object of it"
    return (
        f"the model is {shown(given)}, but has to be an nn.Module or a list of layers: the first "
        "argument of Pipeline is the model, the second its loss_fn"
    )
