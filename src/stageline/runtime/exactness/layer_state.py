"""State that layers move in a forward, such as an EMA in a buffer, a counter or a generator.

A recomputation begins with the state of the first time, and leaves alone what it has become since:

    forward 0      state 0 ─► state 1       state 0 is kept for the recomputation, if it moved
    forward 1      state 1 ─► state 2
    recompute 0    state 0 ─► …             in the place of state 2, which comes back afterwards

Looked at are buffers, and attributes of modules: tensors, numbers, text, generators of torch,
Python and numpy, and lists, tuples, dicts, sets and deques of them; and the generators that Python
and numpy have for everybody. Objects of other kinds are not looked into. Copies are made only of
tensors that were seen to move; all are copied once, when the stage first runs.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import RLock
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from stageline.errors import ModelError
from stageline.runtime.exactness.in_place import version_of
from stageline.runtime.exactness.randomness import is_of_torch

OWN = frozenset(vars(nn.Module()))  # what every module has; buffers are looked at apart
CONTAINERS = (list, tuple, dict, set, deque)
GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
OF_HOST = RLock()  # guards the generators that Python and numpy have for everybody
ABSENT = object()  # in the place of an attribute that is not there
HostGenerators = tuple[Any, Any]  # states of those that Python and numpy have for everybody
Place = tuple[dict[str, Any], str]  # a dict of a module, and a name in it


@dataclass(frozen=True)
class Seen:
    """One place before a forward: what it holds, a copy of that, and a token that tells changes."""

    where: dict[str, Any]
    name: str
    copied: Any
    token: object


@dataclass(frozen=True)
class Before:
    """The state before a forward, or the part of it that the forward moved."""

    places: Sequence[Seen]
    host: HostGenerators | None  # the generators of Python and numpy for everybody


class LayerState:
    """State: which tensors were seen to move, and whether generators of the host were.

    To look at these takes 0.1 ms, so a stage that drew nothing when it first ran is trusted; that
    one begins to draw shows at the end of the step.
    """

    def __init__(self, modules: Iterable[nn.Module], *, has_norms: bool = False) -> None:
        """`has_norms`: with torch's own BatchNorm, whose statistics have rules of their own."""
        self.modules = list(modules)
        parts = (part for module in self.modules for part in module.modules())
        self.parts = [p for p in parts if has_norms or not _is_norm(p)]
        self.moving: set[tuple[int, str]] | None = None  # None: it has not run yet
        self.draws: bool | None = None  # from the generators of the host; None: not known

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Let only one stage at a time draw from the generators that all share.

        Held around a forward that draws from them, and around the first, to see whether it does.
        """
        if self.draws is False:
            yield
            return
        with OF_HOST:
            before = host_generators()
            yield
            self.draws = self.draws or not are_same(before, host_generators())

    def before(self) -> Before:
        """Return the state as it is, with copies of what may move."""
        memo: dict[int, Any] = {}
        found = [
            Seen(where, name, self._copied((where, name), memo), _token(where[name]))
            for where, name in self._places()
        ]
        return Before(found, None if self.draws is False else host_generators())

    def moved_since(self, before: Before) -> Before:
        """Return the part of an earlier state that has moved since then."""
        moved = [seen for seen in before.places if _has_moved(seen)]
        known = {_key((seen.where, seen.name)) for seen in before.places}
        moved += [
            Seen(where, name, ABSENT, ABSENT)
            for where, name in self._places()
            if _key((where, name)) not in known
        ]
        for seen in moved:
            self._check(seen)
        self.moving = (self.moving or set()) | {_key((seen.where, seen.name)) for seen in moved}
        has_drawn = before.host is not None and not are_same(before.host, host_generators())
        return Before(moved, before.host if has_drawn else None)

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """Let forwards run on copies, and put everything back afterwards."""
        before = LayerState(self.modules, has_norms=True).before()  # with copies of all tensors
        known = {_key((seen.where, seen.name)) for seen in before.places}
        with as_it_was(before):
            try:
                yield
            finally:
                for where, name in [p for p in self._places() if _key(p) not in known]:
                    del where[name]

    def _check(self, seen: Seen) -> None:
        is_tensor = isinstance(seen.copied, Tensor)
        is_late = self.moving is not None and _key((seen.where, seen.name)) not in self.moving
        if is_tensor and is_late and seen.where.get(seen.name) is seen.copied:
            self.moving = {*(self.moving or ()), _key((seen.where, seen.name))}
            raise ModelError(
                f"the forward changed {seen.name!r} in place, but not when it first ran, and is to "
                "be recomputed from what it was: run the step again"
            )

    def _places(self) -> Iterator[Place]:
        for part in self.parts:
            for name in part._buffers:  # noqa: SLF001  named_buffers() drops repeats
                yield part._buffers, name  # noqa: SLF001
            if not is_of_torch(part) or part._forward_pre_hooks:  # noqa: SLF001  no public name
                own = vars(part)
                for name in own:
                    if name not in OWN:
                        yield own, name

    def _copied(self, place: Place, memo: dict[int, Any]) -> Any:
        value = place[0][place[1]]
        if isinstance(value, Tensor):
            if self.moving is not None and _key(place) not in self.moving:
                return value  # it has never moved
            if id(value) not in memo:
                memo[id(value)] = _clone(value)
            return memo[id(value)]
        return _copy(value)


@contextmanager
def as_it_was(before: Before | None) -> Iterator[None]:
    """Put an earlier state in place, and take it away again."""
    if before is None or not (before.places or before.host):
        yield
        return
    now = [(seen, seen.where.get(seen.name, ABSENT)) for seen in before.places]
    states = [(g, _generator_state(g)) for _, value in now for g in _generators(value)]
    host = host_generators()
    for seen in before.places:
        _put(seen.where, seen.name, _restored(seen.copied))
    if before.host:
        set_host_generators(before.host)
    try:
        yield
    finally:
        for seen, value in now:
            _put(seen.where, seen.name, value)
        for generator, state in states:
            _set_generator(generator, state)
        if before.host:
            set_host_generators(host)


def host_generators() -> HostGenerators:
    """Return the states of the generators that Python and numpy have for everybody."""
    return random.getstate(), np.random.get_state()


def set_host_generators(states: HostGenerators) -> None:
    """Put such states back."""
    random.setstate(states[0])
    np.random.set_state(states[1])


def are_same(one: HostGenerators, other: HostGenerators) -> bool:
    """Return whether nothing was drawn from these generators in between."""
    return _host_token(one) == _host_token(other)


def _host_token(states: HostGenerators) -> object:
    python, (kind, keys, *rest) = states
    return python, kind, keys.tobytes(), rest


def _is_norm(part: nn.Module) -> bool:
    return isinstance(part, _BatchNorm) and is_of_torch(part)


def _key(place: Place) -> tuple[int, str]:
    return id(place[0]), place[1]


@dataclass(frozen=True)
class _GeneratorState:
    """In the place of a generator: what it is set to, and what it was."""

    generator: Any
    state: Any


def _copy(value: Any) -> Any:
    """Return what brings a value back that is changed in place or replaced."""
    if isinstance(value, GENERATORS):
        return _GeneratorState(value, _generator_state(value))
    if type(value) in (list, set, tuple):
        return type(value)(map(_copy, value))
    if type(value) is deque:
        return deque(map(_copy, value), value.maxlen)
    if type(value) is dict:
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return value.copy()
    return value


def _has_moved(seen: Seen) -> bool:
    """Batch norm changes its statistics without counting it as a change: values are compared."""
    now = seen.where.get(seen.name, ABSENT)
    if isinstance(now, Tensor) and isinstance(seen.copied, Tensor) and now is not seen.copied:
        return seen.token != _token(now) or not torch.equal(now, seen.copied)
    return seen.token != _token(now)


def _put(where: dict[str, Any], name: str, value: Any) -> None:
    if value is ABSENT:
        where.pop(name, None)
    else:
        where[name] = value


def _generators(value: Any) -> Iterator[Any]:
    """Yield the generators in a value."""
    if isinstance(value, GENERATORS):
        yield value
    elif type(value) in CONTAINERS:
        for item in value.values() if type(value) is dict else value:
            yield from _generators(item)


def _restored(copied: Any) -> Any:
    """Return the value of a copy; a generator is set to its state, and stays the same object."""
    if isinstance(copied, _GeneratorState):
        _set_generator(copied.generator, copied.state)
        return copied.generator
    if type(copied) in (list, set, tuple):
        return type(copied)(map(_restored, copied))
    if type(copied) is deque:
        return deque(map(_restored, copied), copied.maxlen)
    if type(copied) is dict:
        return {key: _restored(item) for key, item in copied.items()}
    return copied


def _clone(tensor: Tensor) -> Tensor:
    if tensor.requires_grad and tensor.grad_fn is not None:
        return tensor  # computed anew in every forward, as a normalised weight is
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _token(value: Any) -> object:
    """Return something that is equal as long as a value has not changed."""
    if isinstance(value, Tensor):
        return id(value), version_of(value)
    if isinstance(value, GENERATORS):
        state = _generator_state(value)
        return state.numpy().tobytes() if isinstance(state, Tensor) else repr(state)
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if type(value) is dict:
        return tuple((key, _token(item)) for key, item in value.items())
    if type(value) in CONTAINERS:
        return len(value), tuple(map(_token, value))
    is_plain = isinstance(value, int | float | complex | str | bytes | bool) or value is None
    return (type(value), value) if is_plain else id(value)


def _generator_state(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, np.random.RandomState):
        return value.get_state()
    return None


def _set_generator(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)
