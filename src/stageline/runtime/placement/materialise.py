"""Allocate and initialize the weights of a model that was built on the meta device.

A process allocates only the weights of its own stages, so a model may be larger than the memory of
one process. Random weights depend only on the seed and the layer's name, so they are the same with
any partition.

New tensors are filled with a marker. A tensor that still has it when the first step begins was
initialized neither by `init` nor by a checkpoint, and would be whatever was in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stageline.errors import ModelError
from stageline.model import trees
from stageline.model.device_settings import preserved_generators, seed_generators
from stageline.model.layers import Layer, LayerSequence
from stageline.runtime.exactness.gradient_types import adopt_gradient_type
from stageline.runtime.exactness.randomness.seeded_draws import layer_seed
from stageline.runtime.placement.rebuild_buffers import (
    initialize_module,
    initializing_models,
    rebuild_buffers,
)
from stageline.runtime.placement.whole_weights import whole_weights
from stageline.torch_private import (
    MODULE_TABLES,
    buffer_table,
    is_persistent,
    parameter_table,
    version_of,
)
from stageline.torch_private_training import is_sharding_state

Init = Callable[[Layer], object]

# A NaN with bits that no arithmetic produces, and that arithmetic with it propagates.
MARKER_FLOAT = -1
# Neither an index, nor a fill value, nor a boolean; smaller integers have no unused value.
MARKER_INTEGER = {1: 0x5A, 4: -0x5A3C6B71, 8: -0x5A3C6B715A3C6B71}
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class UninitializedTensor:
    """A tensor that was allocated, with its name and module, and may not be initialized yet."""

    full_name: str
    module: nn.Module
    name: str
    version: int  # changes when the tensor is written to

    @property
    def is_initialized(self) -> bool:
        tensor = getattr(self.module, self.name, None)
        return not (isinstance(tensor, Tensor) and _has_marker(tensor, self.version))


def materialise(
    layers: LayerSequence,
    here: Iterable[int],
    devices: Callable[[int], torch.device | None],
    seed: int,
    init: Init | None,
) -> list[UninitializedTensor]:
    """Allocate and initialize meta tensors of the layers with the numbers `here`.

    Return those that are still uninitialized; a checkpoint may have them.
    """
    made: dict[Tensor, Tensor] = {}
    new_layers = []
    numbers = list(here)
    for number in numbers:
        layer = layers.layers[number]
        tensors = [t for t in tensors_of(layer.module) if t.is_meta and t not in made]
        for tensor in tensors:
            empty = torch.empty_like(tensor, device=devices(number) or "cpu")
            _mark(empty)
            made[tensor] = parameter_or_buffer(tensor, empty)
        if tensors:
            new_layers.append(layer)
    for layer in layers:  # also of other ranks: a weight that two layers share stays one weight
        replace(layer.module, made)
    allocated = _find_allocated(layers, numbers, set(made.values()))
    models = initializing_models(layers)
    for layer in new_layers:
        with preserved_generators():
            seed_generators(layer_seed(seed, 0, 0, layer.name))
            with whole_weights(layer.module, _mark):
                if init is not None:
                    init(layer)
                else:
                    _reset(layer, models)
    blanks = [each for each in allocated if not each.is_initialized]
    rebuild_buffers(blanks, models, seed)
    return [each for each in blanks if not each.is_initialized]


def check_initialized(
    layers: LayerSequence, here: Iterable[int], allocated: Iterable[UninitializedTensor]
) -> None:
    """Raise `ModelError` for the first tensor of these layers that is not initialized."""
    for each in allocated:
        if not each.is_initialized:
            raise ModelError(
                f"{each.full_name!r} was on the meta device and is not initialized: initialize it "
                "in Pipeline's init_fn= or in its module's reset_parameters() or reset_buffers(), "
                "or load a checkpoint that has it (checkpoints have no buffers that are not "
                "persistent)"
            )
    for number in here:
        layer = layers.layers[number]
        for name, module in layer.module.named_modules():
            for attribute, value in vars(module).items():
                if is_sharding_state(module, value):
                    continue  # it looks for the new weights when it first runs
                if attribute not in MODULE_TABLES and _is_on_meta(value):
                    raise ModelError(
                        f"{layer.full_name(name, attribute)!r} is on the meta device and is "
                        "neither a parameter nor a buffer, so it is not initialized: use "
                        "register_buffer(), or set it in Pipeline's init_fn="
                    )


def _reset(layer: Layer, models: Mapping[nn.Module, Any]) -> None:
    """Initialize a layer as its modules, and the models around them, do it themselves."""
    for name, module in layer.module.named_modules():
        if any(True for _ in _own(module)):
            initialize: Any = getattr(module, "reset_parameters", None)
            if initialize is not None:
                initialize()
            elif module not in models:
                where = layer.full_name(name)
                raise ModelError(
                    f"{where!r}, a {type(module).__name__}, is on the meta device and has no "
                    "reset_parameters(): give Pipeline an init_fn= that initializes a layer"
                )
    with torch.no_grad():
        for module in reversed([*layer.module.modules()]):  # a module after its submodules
            if module in models:
                initialize_module(models[module], module)


def parameter_or_buffer(tensor: Tensor, empty: Tensor) -> Tensor:
    """Return `empty` as a parameter if `tensor` is one, or else as it is."""
    if not isinstance(tensor, nn.Parameter):
        return empty
    made = nn.Parameter(empty, requires_grad=tensor.requires_grad)
    adopt_gradient_type(made, tensor)
    return made


def replace(module: nn.Module, made: Mapping[Tensor, Tensor]) -> None:
    """Replace tensors of a module and its submodules by those in `made`."""
    for part in module.modules():
        for places in (parameter_table(part), buffer_table(part)):
            for name, tensor in places.items():
                if tensor is not None and tensor in made:
                    places[name] = made[tensor]  # type: ignore[assignment]


def tensors_of(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _own(module: nn.Module) -> Iterable[Tensor]:
    """Yield the parameters and persistent buffers of a module without its submodules."""
    yield from module.parameters(recurse=False)
    for name, buffer in module.named_buffers(recurse=False):
        if is_persistent(module, name):
            yield buffer


def _find_allocated(
    layers: LayerSequence, here: Iterable[int], made: set[Tensor]
) -> list[UninitializedTensor]:
    """Return the new tensors, except weights whose first layer is on another rank."""
    numbers = set(here)
    found: dict[Tensor, UninitializedTensor | None] = {}
    for number, layer in enumerate(layers.layers):
        for prefix, module in layer.module.named_modules():
            for places in (parameter_table(module), buffer_table(module)):
                for name, tensor in places.items():
                    if tensor is None or tensor not in made:
                        continue
                    is_remote = number not in numbers and isinstance(tensor, nn.Parameter)
                    version = version_of(tensor)
                    full_name = layer.full_name(prefix, name)
                    each = UninitializedTensor(full_name, module, name, version)
                    found.setdefault(tensor, None if is_remote else each)
    return [each for each in found.values() if each is not None]


def _is_on_meta(value: Any) -> bool:
    return any(isinstance(each, Tensor) and each.is_meta for each in trees.tensors_inside(value))


def _mark(tensor: Tensor) -> None:
    bits, marker = _bits(tensor)
    if isinstance(marker, int):
        bits.fill_(marker)
    else:
        bits.copy_(marker)


def _has_marker(tensor: Tensor, version: int) -> bool:
    """Return whether an element has the marker; for small integers, whether all have it."""
    bits, marker = _bits(tensor)
    if not bits.numel() or tensor.is_meta:
        return False
    if isinstance(marker, int):
        return bool((bits == marker).any())
    return version_of(tensor) == version and torch.equal(bits, marker)


def _bits(tensor: Tensor) -> tuple[Tensor, int | Tensor]:
    """Return the memory of a tensor as integers, and the marker that they have at first."""
    own = tensor.detach()
    own = own.to_local() if hasattr(own, "to_local") else own
    own = torch.view_as_real(own) if own.is_complex() else own
    bits = own.view(BITS[own.itemsize])
    if own.is_floating_point():
        return bits, 0xFF if own.itemsize == 1 else MARKER_FLOAT
    if own.dtype is torch.bool or own.itemsize in (4, 8):
        return bits, MARKER_INTEGER[own.itemsize]
    row = torch.arange(bits.numel(), device=bits.device).mul_(0x3D).add_(0x5A).remainder_(0x7F)
    return bits, row.to(bits.dtype).view(bits.shape)
