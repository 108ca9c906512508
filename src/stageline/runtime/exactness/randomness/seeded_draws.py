"""Seed torch's generators before each layer, by seed, step, micro-batch and the layer's name.

So a dropout mask is the same wherever the layer runs, in whichever order, and when its forward is
recomputed. This is enough where one rank at a time runs in a process. Threads share the generators,
so there layers draw from others (`watched_draws.py`).
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from contextlib import AbstractContextManager, nullcontext
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from stageline.model.device_settings import DefaultGenerator, default_generators, states
from stageline.torch_private import DataDependentOutputException, DropoutBase


def layer_seed(seed: int, step: int, microbatch: int, layer: str) -> int:
    """Return the seed of a layer's generator; `torch.manual_seed` with it gives the same numbers.

    The rule must not change: a run that resumes with a later release would draw other numbers.

    >>> layer_seed(0, 0, 0, "blocks.1")
    1195808269320142332
    """
    key = f"{seed}/{step}/{microbatch}/{layer}".encode()
    return int.from_bytes(blake2b(key, digest_size=8).digest()) >> 1


class RandomKey(NamedTuple):
    """The key of a layer's random numbers; hashed only if the layer may draw any."""

    seed: int
    step: int
    microbatch: int
    layer: str


class Draws(Protocol):
    """The random numbers of a stage's layers and of its loss."""

    deterministic: set[nn.Module]  # layers that are known to draw nothing
    counts: bool  # whether `num_draws` is wanted
    num_draws: int  # forwards of layers and losses that drew

    def of_layer(self, module: nn.Module, key: RandomKey) -> AbstractContextManager[Any]:
        """Return a context in which a layer draws by its key."""

    def of_loss(self, loss_fn: object, key: RandomKey) -> AbstractContextManager[Any]:
        """Return a context in which a loss function draws by its key."""


class SeededDraws:
    """Draws where nobody else draws at the same time. State: a count, if it is wanted.

    Seeding and restoring the generator take 3 µs, and looking whether numbers were drawn 3 more.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        device: torch.device | None,
        shared: Container[nn.Module] = (),  # noqa: ARG002  one layer runs at a time
    ) -> None:
        modules = list(modules)
        self.deterministic = {module for module in modules if not may_draw(module)}
        self.generators = generators_of(modules, device)
        self.counts, self.num_draws = False, 0

    def of_layer(self, module: nn.Module, key: RandomKey) -> AbstractContextManager[Any]:
        return nullcontext() if module in self.deterministic else SeededGenerators(self, key)

    def of_loss(self, loss_fn: object, key: RandomKey) -> AbstractContextManager[Any]:  # noqa: ARG002
        return SeededGenerators(self, key)


class SeededGenerators:
    """Within it, torch's default generators draw by a key; afterwards they are as before.

    A checkpoint inside of the block keeps their states, so that it draws the same numbers again.
    """

    __slots__ = ("before", "draws", "key", "seeded")

    def __init__(self, draws: SeededDraws, key: RandomKey) -> None:
        self.draws, self.key = draws, key

    def __enter__(self) -> None:
        seed = layer_seed(*self.key)
        self.before = states(self.draws.generators)
        for generator in self.draws.generators:
            generator.manual_seed(seed)
        if self.draws.counts:
            self.seeded = states(self.draws.generators)

    def __exit__(self, *_: object) -> None:
        if self.draws.counts:
            drawn = states(self.draws.generators)
            self.draws.num_draws += not all(map(is_same_state, self.seeded, drawn))
        for generator, state in zip(self.draws.generators, self.before, strict=True):
            generator.set_state(state)


def generators_of(
    modules: Iterable[nn.Module], device: torch.device | None
) -> list[DefaultGenerator]:
    """Return the default generators of a stage's device, or of those that its weights are on."""
    places = {w.device for module in modules for w in module.parameters()}
    found = (g for place in ({device} if device else places) for g in default_generators(place))
    return list(dict.fromkeys([torch.default_generator, *found]))


def is_same_state(before: Tensor, after: Tensor) -> bool:
    """Return whether a generator has drawn nothing; within a mode of fake tensors nobody knows."""
    try:
        return torch.equal(before, after)
    except DataDependentOutputException:
        return False


def may_draw(module: nn.Module) -> bool:
    """Return False only for modules of torch.nn that are known to be deterministic."""
    return any(not is_of_torch(part) or is_random(part) for part in module.modules())


def is_of_torch(module: nn.Module) -> bool:
    """Return whether torch ships this module, so that it does what its documentation says."""
    return type(module).__module__.startswith("torch.nn.modules.")


def is_random(module: nn.Module) -> bool:
    """Return whether a module of torch.nn may draw random numbers."""
    kinds = (DropoutBase, nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)
    return isinstance(module, kinds) or isinstance(getattr(module, "dropout", None), float)
