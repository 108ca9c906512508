"""Reproducible randomness: a layer draws by seed, step, micro-batch and its own name alone.

So a dropout mask is the same wherever the layer runs, in whichever order, and when its forward is
recomputed. Threads share torch's default generator, so layers must not draw from it: random
operators are intercepted below autograd, by the tag that torch gives them, and are passed a
generator of the layer's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from hashlib import blake2b
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stageline.runtime.exactness.recomputed_draws import keep_for_recomputation
from stageline.torch_private import (
    DataDependentOutputException,
    DropoutBase,
    TorchDispatchMode,
    takes_generator,
)

DEFAULT_GENERATOR = Lock()  # guards torch's default generator, for operators that take no other


def layer_seed(seed: int, step: int, microbatch: int, layer: str) -> int:
    """Return the seed of a layer's generator; `torch.manual_seed` with it gives the same numbers.

    The rule must not change: a run that resumes with a later release would draw other numbers.

    >>> layer_seed(0, 0, 0, "blocks.1")
    1195808269320142332
    """
    key = f"{seed}/{step}/{microbatch}/{layer}".encode()
    return int.from_bytes(blake2b(key, digest_size=8).digest()) >> 1


class RandomKey(NamedTuple):
    """The key of a layer's random numbers; hashed only if the layer draws any."""

    seed: int
    step: int
    microbatch: int
    layer: str


def may_draw(module: nn.Module) -> bool:
    """Return False only for modules of torch.nn that are known to be deterministic."""
    return any(not is_of_torch(part) or _is_random(part) for part in module.modules())


def is_of_torch(module: nn.Module) -> bool:
    """Return whether torch ships this module, so that it does what its documentation says."""
    return type(module).__module__.startswith("torch.nn.modules.")


def _is_random(module: nn.Module) -> bool:
    kinds = (DropoutBase, nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)
    return isinstance(module, kinds) or isinstance(getattr(module, "dropout", None), float)


class DeterministicLayers:
    """Layers that drew no random numbers when they were observed. State: the observations.

    Observing costs about 8 µs an operator, in Python, where ranks wait for each other. So a layer
    is observed when it first runs, and again when it is switched to training or the probability of
    a dropout in it changes. If a layer draws nevertheless, torch's default generator shows it.

    `trusts`: whether a layer that drew nothing is left unobserved from then on. `num_draws` counts
    the forwards that drew.
    """

    def __init__(self, modules: Iterable[nn.Module], *, trusts: bool) -> None:
        self.random_parts = {m: [p for p in m.modules() if _is_random(p)] for m in modules}
        self.never_draw = {module for module in self.random_parts if not may_draw(module)}
        self.observed: dict[tuple[nn.Module, object], bool] = {}  # whether it was deterministic
        self.trusts = trusts
        self.num_draws = 0

    def is_deterministic(self, module: nn.Module) -> bool:
        if module in self.never_draw:
            return True
        return self.trusts and self.observed.get(self._key(module), False)

    def record(self, module: nn.Module, *, drew: bool) -> None:
        self.observed[self._key(module)] = not drew
        self.num_draws += drew

    def _key(self, module: nn.Module) -> tuple[nn.Module, object]:
        probabilities = [
            (part.training, getattr(part, "p", None), getattr(part, "dropout", None))
            for part in self.random_parts[module]
        ]
        return module, (module.training, torch.is_grad_enabled(), tuple(probabilities))


class LayerRandomness(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Within it, all random operators draw from a generator that is seeded by a layer's key.

    State: a generator for each device that was drawn on, and whether any was. If states of
    generators are given, each operator draws from the next of them.
    """

    def __init__(self, key: RandomKey, states: Sequence[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.key, self.drew = key, False
        self.states = iter(states)
        self.generators: dict[torch.device, torch.Generator] = {}

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
        keep_for_recomputation(generator, partial(LayerRandomness, self.key))
        if takes_generator(func):
            self.drew = True
            return func(*args, **kwargs | {"generator": generator})
        # Attention is one of these, and draws only if it has a dropout.
        before = generator.get_state()
        result = _call_with_default(generator, lambda: func(*args, **kwargs))
        self.drew = self.drew or not _is_same_state(before, generator.get_state())
        return result

    def restart(self, key: RandomKey) -> None:
        """Draw from generators with another key from now on."""
        self.key = key
        self.generators.clear()

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self.generators:
            self.generators[device] = torch.Generator(device).manual_seed(layer_seed(*self.key))
        if (state := next(self.states, None)) is not None:
            self.generators[device].set_state(state)
        return self.generators[device]


def _is_same_state(before: torch.Tensor, after: Tensor) -> bool:
    """Return whether a generator has drawn nothing; within a mode of fake tensors nobody knows."""
    try:
        return torch.equal(before, after)
    except DataDependentOutputException:
        return False


@cache
def _is_random_operator(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def _device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    tensors = (arg for arg in args if isinstance(arg, Tensor))
    found = next(tensors, None)
    return found.device if found is not None else torch.device(kwargs.get("device") or "cpu")


def _call_with_default(generator: torch.Generator, call: Callable[[], Any]) -> Any:
    """Give torch's default generator this one's state during a call that takes no generator."""
    default = torch.default_generator
    if generator.device.type == "cuda":
        default = torch.cuda.default_generators[generator.device.index or 0]
    with DEFAULT_GENERATOR:
        before = default.get_state()
        default.set_state(generator.get_state())
        try:
            return call()
        finally:
            generator.set_state(default.get_state())
            default.set_state(before)
