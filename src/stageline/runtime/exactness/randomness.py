"""Randomness by name: what a layer draws depends on seed, step, micro-batch and its name alone.

So a dropout mask is the same wherever the layer runs, in whichever order, and when its forward is
recomputed. Threads share torch's one default generator, so layers must not draw from it: random
operators are caught below autograd, by the tag that torch gives them, and handed a generator of
the layer's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from hashlib import blake2b
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules import dropout
from torch.utils._python_dispatch import TorchDispatchMode

DEFAULT_GENERATOR = Lock()  # guards torch's own, for operators that take no other


def layer_seed(seed: int, step: int, microbatch: int, layer: str) -> int:
    """The seed of a layer's generator. `torch.manual_seed` with it gives the same numbers.

    >>> layer_seed(0, 0, 0, "blocks.1") != layer_seed(0, 0, 1, "blocks.1")
    True
    """
    key = f"{seed}/{step}/{microbatch}/{layer}".encode()
    return int.from_bytes(blake2b(key, digest_size=8).digest()) >> 1


class Key(NamedTuple):
    """What a layer's randomness depends on; hashed only if the layer draws."""

    seed: int
    step: int
    microbatch: int
    layer: str


def drawing(key: Key) -> Drawing:
    """Within it, all that is random draws from a generator of this key's own."""
    return Drawing(key)


def may_draw(module: nn.Module) -> bool:
    """False only for modules of torch.nn that are known to be deterministic."""
    return any(not is_of_torch(part) or _is_random(part) for part in module.modules())


def is_of_torch(module: nn.Module) -> bool:
    """Whether it is a module that torch ships, and so does what its documentation says."""
    return type(module).__module__.startswith("torch.nn.modules.")


def _is_random(module: nn.Module) -> bool:
    kinds = (dropout._DropoutNd, nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)  # noqa: SLF001  the base of all dropouts
    return isinstance(module, kinds) or isinstance(getattr(module, "dropout", None), float)


class Silent:
    """Layers that were watched and drew nothing. State: what was seen of them.

    Watching costs about 8 µs an operator, in Python, where ranks wait for each other. So a layer is
    watched when it first runs, and again when it is switched to training, or a dropout in it is
    given another chance. That some layer draws nevertheless shows in torch's own generator.
    """

    def __init__(self, modules: Iterable[nn.Module], *, trusts: bool) -> None:
        self.parts = {m: [p for p in m.modules() if _is_random(p)] for m in modules}
        self.never = {module for module in self.parts if not may_draw(module)}
        self.seen: dict[tuple[nn.Module, object], bool] = {}  # whether it drew nothing
        self.trusts = trusts

    def is_silent(self, module: nn.Module) -> bool:
        if module in self.never:
            return True
        return self.trusts and self.seen.get(self._key(module), False)

    def note(self, module: nn.Module, *, drew: bool) -> None:
        self.seen[self._key(module)] = not drew

    def _key(self, module: nn.Module) -> tuple[nn.Module, object]:
        chances = [
            (part.training, getattr(part, "p", None), getattr(part, "dropout", None))
            for part in self.parts[module]
        ]
        return module, (module.training, torch.is_grad_enabled(), tuple(chances))


class Drawing(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """State: a generator for each device that was drawn on, and whether any was."""

    def __init__(self, key: Key) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.key, self.drew = key, False
        self.generators: dict[torch.device, torch.Generator] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not _draws(func) or kwargs.get("generator"):
            return func(*args, **kwargs)
        self.drew = True
        generator = self._generator(_device(args, kwargs))
        if any(argument.name == "generator" for argument in func._schema.arguments):  # noqa: SLF001
            return func(*args, **kwargs | {"generator": generator})
        return _with_default(generator, lambda: func(*args, **kwargs))

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self.generators:
            self.generators[device] = torch.Generator(device).manual_seed(layer_seed(*self.key))
        return self.generators[device]


@cache
def _draws(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def _device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    tensors = (arg for arg in args if isinstance(arg, torch.Tensor))
    found = next(tensors, None)
    return found.device if found is not None else torch.device(kwargs.get("device") or "cpu")


def _with_default(generator: torch.Generator, draw: Callable[[], Any]) -> Any:
    """Lend the generator's state to torch's own, for an operator that takes no other."""
    default = torch.default_generator
    if generator.device.type == "cuda":
        default = torch.cuda.default_generators[generator.device.index or 0]
    with DEFAULT_GENERATOR:
        before = default.get_state()
        default.set_state(generator.get_state())
        try:
            return draw()
        finally:
            generator.set_state(default.get_state())
            default.set_state(before)
