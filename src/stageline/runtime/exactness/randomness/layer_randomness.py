"""The random numbers of one layer: operators draw from generators that are seeded by its key."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from threading import Lock
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  as everybody calls it

from stageline.model.device_settings import default_generators, with_index
from stageline.runtime.exactness.randomness.recomputed_draws import keep_for_recomputation
from stageline.runtime.exactness.randomness.seeded_draws import (
    RandomKey,
    is_same_state,
    layer_seed,
)
from stageline.torch_private import TorchDispatchMode, operator_schema

DEFAULT_GENERATOR = Lock()  # guards torch's default generators, for operators that take no other


class LayerRandomness(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Within it, all random operators draw from a generator that is seeded by a layer's key.

    State: a generator for each device that was drawn on, whether any was, and whether that was
    outside of the functions that are known to draw. If states of generators are given, each
    operator draws from the next of them.
    """

    def __init__(self, key: RandomKey, states: Sequence[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.key, self.drew = key, False
        self.drew_in_functions = self.drew_elsewhere = False
        self.is_entered = self.is_in_function = False
        self.states = iter(states)
        self.generators: dict[torch.device, torch.Generator] = {}

    def __enter__(self) -> Self:
        self.is_entered = True
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        self.is_entered = False
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    @contextmanager
    def in_function(self) -> Iterator[None]:
        """See the operators of a function that is known to draw."""
        self.is_in_function = True
        try:
            with nullcontext() if self.is_entered else self:
                yield
        finally:
            self.is_in_function = False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not _is_random_operator(func) or kwargs.get("generator"):
            return func(*args, **kwargs)
        generator = self._generator(_device(args, kwargs))
        if any(argument.name == "generator" for argument in operator_schema(func).arguments):
            self._record_draw()
            return func(*args, **kwargs | {"generator": generator})
        # Attention is one of these, and draws only if it has a dropout.
        before = generator.get_state()
        result = _call_with_default(generator, lambda: func(*args, **kwargs))
        if not is_same_state(before, generator.get_state()):
            self._record_draw()
        return result

    def _record_draw(self) -> None:
        self.drew = True
        self.drew_in_functions |= self.is_in_function
        self.drew_elsewhere |= not self.is_in_function

    def restart(self, key: RandomKey) -> None:
        """Draw from generators with another key from now on."""
        self.key = key
        self.generators.clear()

    def _generator(self, device: torch.device) -> torch.Generator:
        """Return the generator of a device, for an operator that is about to draw."""
        if device not in self.generators:
            self.generators[device] = torch.Generator(device).manual_seed(layer_seed(*self.key))
        generator = self.generators[device]
        if (state := next(self.states, None)) is not None:
            generator.set_state(state)
        keep_for_recomputation(generator, partial(LayerRandomness, self.key))
        return generator

    def dropout(  # with torch's arguments
        self,
        x: Tensor,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
    ) -> Tensor:
        """Return `F.dropout(x, …)`, bit for bit and with its graph, outside of the mode.

        To see its operators costs 16 µs more, in Python, where ranks wait for each other.
        """
        if not (training and 0.0 < p < 1.0 and _is_plain(x)) or inplace:
            with self.in_function():
                return F.dropout(x, p, training, inplace)
        self.drew = True
        noise = torch.empty_like(x).bernoulli_(1 - p, generator=self._generator(x.device))
        return x * noise.div_(1 - p)


@cache
def _is_random_operator(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def _device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    tensors = (arg for arg in args if isinstance(arg, Tensor))
    found = next(tensors, None)
    if found is not None:
        return found.device
    return with_index(torch.device(kwargs.get("device") or "cpu"))


def _call_with_default(generator: torch.Generator, call: Callable[[], Any]) -> Any:
    """Give torch's default generator this one's state during a call that takes no generator."""
    default = default_generators(generator.device)[-1]
    with DEFAULT_GENERATOR:
        before = default.get_state()
        default.set_state(generator.get_state())
        try:
            return call()
        finally:
            generator.set_state(default.get_state())
            default.set_state(before)


def _is_plain(x: Tensor) -> bool:
    """Return whether torch computes the dropout of a tensor from the four operators used here."""
    is_dense = x.layout is torch.strided and not x.is_nested and x.numel() > 0
    return type(x) is Tensor and x.device.type == "cpu" and is_dense
