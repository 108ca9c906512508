"""Encode Python values as bytes; decoding runs no code, whoever sent them.

    [ length of the text ][ text ][ bytes of a tensor ][ bytes of a tensor ] …

The text is JSON: a tree (`trees.py`) as its spec and its leaves. Classes are encoded by name and
looked up in modules that are already imported; only containers and Enums are accepted. An instance
is built from its parts without calling `__init__`.
"""

from __future__ import annotations

import base64
import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from enum import Enum, Flag
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stageline.errors import ModelError, StageError
from stageline.model import trees
from stageline.model.trees import LEAF, Spec
from stageline.torch_private import pytree

LENGTH = 8  # bytes
SAFE_INTEGER = 2**53  # JSON numbers are exact up to here
CONTAINERS: dict[str, type[Any]] = {
    "tuple": tuple,
    "list": list,
    "dict": dict,
    "size": torch.Size,
    "proxy": MappingProxyType,
}
# The factories of a defaultdict that are accepted: others could run any code.
FACTORIES: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (list, dict, set, tuple, int, float, str, bool)
}
SENDABLE = "tensors, numbers, strings, None, and tuples, lists, dicts, named tuples and dataclasses"


def encode(value: Any) -> bytes:
    """Return the bytes of a value; raise `ModelError` if a part of it cannot be sent.

    >>> decode(encode({"rate": 0.5, 3: (torch.ones(2), None)}))
    {'rate': 0.5, 3: (tensor([1., 1.]), None)}
    """
    tensors: list[Tensor] = []
    try:
        text = json.dumps(_encode_tree(value, tensors)).encode()
    except RecursionError:
        raise ModelError(
            f"a {type(value).__name__} cannot be sent to another rank: it is nested too deeply"
        ) from None
    parts = [len(text).to_bytes(LENGTH, "little"), text]
    parts += [_bytes_of(tensor) for tensor in tensors]
    return b"".join(parts)


def decode(data: bytes | bytearray) -> Any:
    """Return the encoded value; raise `StageError` if the bytes are malformed."""
    try:
        length = int.from_bytes(data[:LENGTH], "little")
        text, rest = data[LENGTH : LENGTH + length], memoryview(data)[LENGTH + length :]
        return _decode_tree(json.loads(bytes(text)), _TensorBytes(rest))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise StageError(
            f"a message from another rank cannot be read: {type(error).__name__}: {error}; do all "
            "ranks run the same version of Stageline and of the script?"
        ) from error


def spec_to_text(spec: Spec) -> str:
    """Return the structure of a tree, without its leaves, as text."""
    return json.dumps(_encode_spec(spec))


def spec_from_text(text: str) -> Spec:
    """Return the structure that `spec_to_text` was given."""
    return _decode_spec(json.loads(text))


def _encode_tree(value: Any, tensors: list[Tensor]) -> list[Any]:
    leaves, spec = trees.flatten(value)
    return [_encode_spec(spec), [_encode_leaf(leaf, tensors) for leaf in leaves]]


def _decode_tree(tree: list[Any], data: _TensorBytes) -> Any:
    spec, leaves = tree
    return trees.unflatten([_decode_leaf(leaf, data) for leaf in leaves], _decode_spec(spec))


def _encode_spec(spec: Spec) -> Any:
    """Return a spec in JSON types; a leaf is 0."""
    if spec.type is None:
        return 0
    tensors: list[Tensor] = []
    context = None if spec.context is None else _encode_tree(spec.context, tensors)
    if tensors:
        raise ModelError(
            f"a {spec.type.__name__} cannot be sent to another rank: it has a tensor among its keys"
        )
    children = [_encode_spec(child) for child in spec.children]
    return [_name_of(spec.type, _is_container), context, children]


def _decode_spec(text: Any) -> Spec:
    if text == 0:
        return LEAF
    name, context, children = text
    kind = _class_of(name, _is_container)
    found = None if context is None else _decode_tree(context, _TensorBytes(memoryview(b"")))
    return Spec(kind, found, tuple(_decode_spec(child) for child in children))


def _encode_leaf(leaf: Any, tensors: list[Tensor]) -> Any:
    """Return JSON types as they are, and others as a list that begins with their kind."""
    if leaf is None or type(leaf) in (bool, str):
        return leaf
    if type(leaf) is int:
        return leaf if abs(leaf) < SAFE_INTEGER else ["int", hex(leaf)]
    if type(leaf) is float:
        return leaf if math.isfinite(leaf) else ["float", leaf.hex()]
    for kind, write in WRITERS.items():
        if isinstance(leaf, kind):
            return write(leaf)
    if isinstance(leaf, Tensor):
        _check_plain(leaf)
        tensors.append(leaf)
        shape, stride = list(leaf.shape), list(_dense(leaf).stride())
        where = str(leaf.device)
        return ["tensor", _torch_name(leaf.dtype), shape, stride, where, leaf.requires_grad]
    for name, factory in FACTORIES.items():
        if leaf is factory:
            return ["factory", name]
    raise ModelError(f"a {type(leaf).__name__} cannot be sent to another rank: send {SENDABLE}")


def _decode_leaf(text: Any, data: _TensorBytes) -> Any:
    if not isinstance(text, list):
        return text
    kind, *rest = text
    if kind == "tensor":
        return data.take(*rest)
    return READERS[kind](*rest)


class _TensorBytes:
    """The bytes of a message's tensors. State: those that have not been taken yet."""

    def __init__(self, rest: memoryview) -> None:
        self.rest = rest

    def take(
        self, dtype: str, shape: list[int], stride: list[int], device: str, needs_gradient: bool
    ) -> Tensor:
        kind = _torch_thing(dtype, torch.dtype)
        count = math.prod(shape)
        reach = sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) + 1
        size = count * kind.itemsize
        if min((0, *shape, *stride)) < 0 or size > len(self.rest) or (count and reach > count):
            raise ValueError(f"a tensor of shape {shape} does not fit the bytes received")
        found = torch.empty_strided(shape, stride, dtype=kind)
        if count:
            raw = torch.frombuffer(bytearray(self.rest[:size]), dtype=torch.uint8)
            found.as_strided((count,), (1,)).view(torch.uint8).copy_(raw)
        self.rest = self.rest[size:]
        # a device has a number in each process; here the current one of its kind is meant
        moved = found if device == "cpu" else found.to(torch.device(device).type)
        return moved.requires_grad_(needs_gradient)


def _check_plain(tensor: Tensor) -> None:
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    if not is_plain or tensor.is_meta or tensor.is_quantized:
        raise ModelError(
            f"a {type(tensor).__name__} of {tensor.layout} on {tensor.device} cannot be sent to "
            "another rank: send plain dense tensors"
        )


def _dense(tensor: Tensor) -> Tensor:
    """Return a tensor on meta with the strides of a copy: dense, in the same order."""
    here = tensor.detach()
    return torch.empty_like(here, device="meta") if here.numel() else here.contiguous()


def _bytes_of(tensor: Tensor) -> bytes:
    here = tensor.detach().cpu()
    dense = torch.empty_strided(tensor.shape, _dense(tensor).stride(), dtype=tensor.dtype)
    dense.copy_(here.resolve_conj().resolve_neg())
    if not dense.numel():
        return b""
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy().tobytes()


def _enum(member: Enum) -> list[Any]:
    name = _name_of(type(member), _is_enum)
    if isinstance(member, Flag):
        return ["flag", name, member.value]
    return ["enum", name, member.name]


def _numpy(scalar: np.generic) -> list[Any]:
    if scalar.dtype.kind not in "biufc":
        raise ModelError(
            f"a {type(scalar).__name__} of numpy cannot be sent to another rank: send a number"
        )
    return ["numpy", scalar.dtype.str, scalar.tobytes().hex()]


def _name_of(kind: type[Any], is_fit: Callable[[type[Any]], bool]) -> str:
    """Return the name by which other ranks find a class."""
    for name, each in CONTAINERS.items():
        if kind is each:
            return name
    name = f"{kind.__module__}:{kind.__qualname__}"
    try:
        found = _class_of(name, is_fit)
    except ValueError:
        found = None
    if found is not kind:
        raise ModelError(
            f"a {kind.__qualname__} of {kind.__module__} cannot be sent to another rank: there its "
            f"class cannot be found by its name: define it at the top level of a module, or send "
            f"{SENDABLE}"
        )
    return name


def _class_of(name: str, is_fit: Callable[[type[Any]], bool]) -> type[Any]:
    """Return a class of an imported module; raise ValueError unless `is_fit` accepts it."""
    if name in CONTAINERS:
        return CONTAINERS[name]
    module, _, path = name.partition(":")
    if module not in sys.modules:
        raise ValueError(f"{module} is not imported on this rank, but {path} of it was sent")
    found: Any = sys.modules[module]
    for part in path.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type) or not is_fit(found):
        raise ValueError(f"{name} was sent, but is not a container or Enum on this rank")
    return found


def _is_container(kind: type[Any]) -> bool:
    """Return whether `trees` flattens instances, which it rebuilds without calling the class."""
    if kind in pytree.SUPPORTED_NODES:
        return True
    return is_dataclass(kind) or issubclass(kind, tuple | list | Mapping)


def _is_enum(kind: type[Any]) -> bool:
    return issubclass(kind, Enum)


def _is_flag(kind: type[Any]) -> bool:
    return issubclass(kind, Flag)


def _torch_name(thing: object) -> str:
    return str(thing).removeprefix("torch.")


def _torch_thing(name: str, kind: type[Any]) -> Any:
    found = getattr(torch, name, None)
    if not isinstance(found, kind):
        raise ValueError(f"torch has no {kind.__name__} {name!r}")
    return found


# In this order: an Enum may also be a number, and so may a numpy scalar.
WRITERS: dict[type[Any], Callable[[Any], list[Any]]] = {
    Enum: _enum,
    np.generic: _numpy,
    complex: lambda leaf: ["complex", leaf.real.hex(), leaf.imag.hex()],
    bytes: lambda leaf: ["bytes", base64.b64encode(leaf).decode()],
    PurePath: lambda leaf: ["path", str(leaf)],
    torch.dtype: lambda leaf: ["dtype", _torch_name(leaf)],
    torch.layout: lambda leaf: ["layout", _torch_name(leaf)],
    torch.memory_format: lambda leaf: ["memory format", _torch_name(leaf)],
    torch.device: lambda leaf: ["device", str(leaf)],
}
READERS: dict[str, Callable[..., Any]] = {
    "int": lambda text: int(text, 16),
    "float": float.fromhex,
    "complex": lambda real, imag: complex(float.fromhex(real), float.fromhex(imag)),
    "bytes": base64.b64decode,
    "path": Path,
    "enum": lambda name, member: _class_of(name, _is_enum).__members__[member],
    "flag": lambda name, value: _class_of(name, _is_flag)(value),
    "numpy": lambda kind, data: np.frombuffer(bytes.fromhex(data), np.dtype(kind))[0],
    "dtype": lambda name: _torch_thing(name, torch.dtype),
    "layout": lambda name: _torch_thing(name, torch.layout),
    "memory format": lambda name: _torch_thing(name, torch.memory_format),
    "device": torch.device,
    "factory": FACTORIES.__getitem__,
}
