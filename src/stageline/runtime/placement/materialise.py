"""Models built on the meta device: a process makes only the weights that its own stages use.

So a model may be larger than any one process. Weights that are drawn depend on the seed and the
layer's name alone, so they are the same however the model is cut.

What is made holds a mark until somebody fills it. What still holds it when the first step begins
was filled by nobody, neither by `init` nor by a checkpoint, and would be whatever was in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stageline.errors import ModelError
from stageline.model.layers import Layer, LayerSequence
from stageline.runtime import trees
from stageline.runtime.exactness.randomness import layer_seed
from stageline.torch_private import MODULE_TABLES, buffer_table, parameter_table, version_of

Init = Callable[[Layer], object]

# Not a number, by bits that no arithmetic makes, and that arithmetic with it keeps.
BLANK_FLOAT = -1
# Neither an index, nor a fill value, nor a boolean; smaller integers have no value to spare.
BLANK_INTEGER = {1: 0x5A, 4: -0x5A3C6B71, 8: -0x5A3C6B715A3C6B71}
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Blank:
    """A tensor that has been made and not yet filled: whose it is, and under which name."""

    place: str
    module: nn.Module
    name: str
    version: int  # changes when the tensor is written to

    @property
    def is_filled(self) -> bool:
        tensor = getattr(self.module, self.name, None)
        return not (isinstance(tensor, Tensor) and _is_blank(tensor, self.version))


def materialise(
    layers: LayerSequence,
    here: Iterable[int],
    devices: Callable[[int], torch.device | None],
    seed: int,
    init: Init | None,
) -> list[Blank]:
    """Give the layers that are here weights and buffers, if they have none yet.

    Returns those that have no values even so; a checkpoint may still bring them.
    """
    made: dict[Tensor, Tensor] = {}
    fresh = []
    numbers = list(here)
    for number in numbers:
        layer = layers.layers[number]
        tensors = [t for t in tensors_of(layer.module) if t.is_meta and t not in made]
        for tensor in tensors:
            empty = torch.empty_like(tensor, device=devices(number) or "cpu")
            _mark(empty)
            made[tensor] = parameter_or_buffer(tensor, empty)
        if tensors:
            fresh.append(layer)
    for layer in layers:  # also elsewhere: a weight that two layers share stays one weight
        replace(layer.module, made)
    blanks = _blanks(layers, numbers, set(made.values()))
    for layer in fresh:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(layer_seed(seed, 0, 0, layer.name))
            (init or reset)(layer)
    return [blank for blank in blanks if not blank.is_filled]


def check_filled(layers: LayerSequence, here: Iterable[int], blanks: Iterable[Blank]) -> None:
    """Raise for the first tensor of these layers that has no values."""
    for blank in blanks:
        if not blank.is_filled:
            raise ModelError(
                f"{blank.place!r} was made from the meta device, but nothing has filled it: fill "
                "it in Pipeline's init= or in its module's reset_parameters(), or load a "
                "checkpoint that has it (a buffer that is not persistent is in none)"
            )
    for number in here:
        layer = layers.layers[number]
        for name, module in layer.module.named_modules():
            for attribute, value in vars(module).items():
                if attribute not in MODULE_TABLES and _is_on_meta(value):
                    raise ModelError(
                        f"{_joined(layer.name, name, attribute)!r} is on the meta device, and is "
                        "neither a parameter nor a buffer, so nobody gives it values: use "
                        "register_buffer(), or set it in Pipeline's init="
                    )


def reset(layer: Layer) -> None:
    """As its modules do it themselves."""
    for name, module in layer.module.named_modules():
        if any(True for _ in _own(module)):
            again: Any = getattr(module, "reset_parameters", None)
            if again is None:
                where = _joined(layer.name, name)
                raise ModelError(
                    f"{where!r}, a {type(module).__name__}, is on the meta device and has no "
                    "reset_parameters(): give Pipeline an init=, a function that fills a layer"
                )
            again()


def parameter_or_buffer(tensor: Tensor, empty: Tensor) -> Tensor:
    """Another tensor as what the first one is."""
    is_parameter = isinstance(tensor, nn.Parameter)
    return nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty


def replace(module: nn.Module, made: Mapping[Tensor, Tensor]) -> None:
    """Tensors of a module by others, wherever it has them."""
    for part in module.modules():
        for places in (parameter_table(part), buffer_table(part)):
            for name, tensor in places.items():
                if tensor is not None and tensor in made:
                    places[name] = made[tensor]  # type: ignore[assignment]


def tensors_of(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _own(module: nn.Module) -> Iterable[Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)


def _blanks(layers: LayerSequence, here: Iterable[int], made: set[Tensor]) -> list[Blank]:
    """Where the new tensors are; a weight that an earlier layer elsewhere has comes from there."""
    numbers = set(here)
    found: dict[Tensor, Blank | None] = {}
    for number, layer in enumerate(layers.layers):
        for prefix, module in layer.module.named_modules():
            for places in (parameter_table(module), buffer_table(module)):
                for name, tensor in places.items():
                    if tensor is None or tensor not in made:
                        continue
                    is_elsewhere = number not in numbers and isinstance(tensor, nn.Parameter)
                    version = version_of(tensor)
                    blank = Blank(_joined(layer.name, prefix, name), module, name, version)
                    found.setdefault(tensor, None if is_elsewhere else blank)
    return [blank for blank in found.values() if blank is not None]


def _is_on_meta(value: Any) -> bool:
    return any(isinstance(each, Tensor) and each.is_meta for each in trees.tensors_inside(value))


def _joined(*names: str) -> str:
    return ".".join(name for name in names if name)


def _mark(tensor: Tensor) -> None:
    bits, blank = _bits(tensor)
    if isinstance(blank, int):
        bits.fill_(blank)
    else:
        bits.copy_(blank)


def _is_blank(tensor: Tensor, version: int) -> bool:
    """Whether a part of it is as it was made; of small integers, whether all of it is."""
    bits, blank = _bits(tensor)
    if not bits.numel() or tensor.is_meta:
        return False
    if isinstance(blank, int):
        return bool((bits == blank).any())
    return version_of(tensor) == version and torch.equal(bits, blank)


def _bits(tensor: Tensor) -> tuple[Tensor, int | Tensor]:
    """Return the memory of a tensor as integers, and what they are while nobody has filled it."""
    own = tensor.detach()
    own = own.to_local() if hasattr(own, "to_local") else own
    own = torch.view_as_real(own) if own.is_complex() else own
    bits = own.view(BITS[own.itemsize])
    if own.is_floating_point():
        return bits, 0xFF if own.itemsize == 1 else BLANK_FLOAT
    if own.dtype is torch.bool or own.itemsize in (4, 8):
        return bits, BLANK_INTEGER[own.itemsize]
    row = torch.arange(bits.numel(), device=bits.device).mul_(0x3D).add_(0x5A).remainder_(0x7F)
    return bits, row.to(bits.dtype).view(bits.shape)
