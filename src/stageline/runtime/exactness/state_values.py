"""Copy, compare and restore one value of a layer's state, random generators included."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stageline.torch_private import version_of

CONTAINERS = (list, tuple, dict, set, deque)
GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
GlobalGenerators = tuple[Any, Any]  # states of the global generators of Python and numpy


@dataclass(frozen=True)
class _GeneratorState:
    """The copy of a generator: the same object, and its state."""

    generator: Any
    state: Any


def copy_value(value: Any) -> Any:
    """Return a copy from which `restore_value` makes the value again; tensors are not copied."""
    if isinstance(value, GENERATORS):
        return _GeneratorState(value, generator_state(value))
    if type(value) in (list, set, tuple):
        return type(value)(map(copy_value, value))
    if type(value) is deque:
        return deque(map(copy_value, value), value.maxlen)
    if type(value) is dict:
        return {key: copy_value(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return value.copy()
    return value


def restore_value(copied: Any) -> Any:
    """Return the value of a copy; a generator is set to its state, and stays the same object."""
    if isinstance(copied, _GeneratorState):
        set_generator_state(copied.generator, copied.state)
        return copied.generator
    if type(copied) in (list, set, tuple):
        return type(copied)(map(restore_value, copied))
    if type(copied) is deque:
        return deque(map(restore_value, copied), copied.maxlen)
    if type(copied) is dict:
        return {key: restore_value(item) for key, item in copied.items()}
    return copied


def clone(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor, unless every forward computes it anew."""
    if tensor.requires_grad and tensor.grad_fn is not None:
        return tensor  # as a normalised weight is
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def fingerprint(value: Any) -> object:
    """Return something that is equal as long as a value has not changed."""
    if isinstance(value, Tensor):
        return id(value), version_of(value)
    if isinstance(value, GENERATORS):
        state = generator_state(value)
        return state.numpy().tobytes() if isinstance(state, Tensor) else repr(state)
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if type(value) is dict:
        return tuple((key, fingerprint(item)) for key, item in value.items())
    if type(value) in CONTAINERS:
        return len(value), tuple(map(fingerprint, value))
    is_plain = isinstance(value, int | float | complex | str | bytes | bool) or value is None
    return (type(value), value) if is_plain else id(value)


def generators_in(value: Any) -> Iterator[Any]:
    """Yield the random generators in a value."""
    if isinstance(value, GENERATORS):
        yield value
    elif type(value) in CONTAINERS:
        for item in value.values() if type(value) is dict else value:
            yield from generators_in(item)


def generator_state(generator: Any) -> Any:
    """Return the state of a generator of torch, Python or numpy."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state()


def set_generator_state(generator: Any, state: Any) -> None:
    """Set the state of a generator of torch, Python or numpy."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def global_generators() -> GlobalGenerators:
    """Return the states of the global generators of Python and numpy."""
    return random.getstate(), np.random.get_state()


def set_global_generators(states: GlobalGenerators) -> None:
    """Set the states of the global generators of Python and numpy."""
    random.setstate(states[0])
    np.random.set_state(states[1])


def are_equal_generators(one: GlobalGenerators, other: GlobalGenerators) -> bool:
    """Return whether nothing was drawn from the global generators between two states."""
    return _comparable(one) == _comparable(other)


def _comparable(states: GlobalGenerators) -> object:
    python, (kind, keys, *rest) = states
    return python, kind, keys.tobytes(), rest
