"""The versions of a stage's weights that micro-batches on their way still use.

    version 5    the parameters' own memory, which the next step changes, unless …
    version 4    memory that the parameters had before step 5, for as long as someone uses it
    version 3    …

A version is copied on writing: a step whose weights are still in use moves the parameters to a copy
and leaves the old memory behind. What computes with a version is given doubles of the parameters in
its memory, so autograd's graphs hold on to the version, and not to what the parameters become.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor, nn

Use = tuple[int, nn.Parameter]  # a layer, and one of its weights


class Version(NamedTuple):
    """Doubles of all weights: by layer under their names in it, and by use."""

    by_layer: dict[int, dict[str, Tensor]]
    by_use: dict[Use, nn.Parameter]


class Versions:
    """State: the versions in use, and the gradients of the mini-batch whose step is next."""

    def __init__(self, modules: Mapping[int, nn.Module]) -> None:
        self.names = {number: _names(module) for number, module in modules.items()}
        self.parameters = list(dict.fromkeys(p for each in self.names.values() for p in each))
        self.latest = 0
        self.kept = {0: self._doubles()}
        self.gradients: dict[Use, Tensor] = {}

    def of(self, version: int) -> dict[int, dict[str, Tensor]]:
        """By layer, what takes the place of its weights."""
        return self.kept[version].by_layer

    @contextmanager
    def gathering(self, version: int) -> Iterator[None]:
        """Around a backward: autograd adds to what earlier micro-batches gave, of any version."""
        doubles = self.kept[version].by_use
        for use, double in doubles.items():
            double.grad = self.gradients.get(use)
        yield
        for use, double in doubles.items():
            if double.grad is not None:
                self.gradients[use], double.grad = double.grad, None

    def hand_over(self) -> None:
        """What was gathered becomes the gradient; several uses of a weight in layer order."""
        for parameter in self.parameters:
            uses = (self.gradients.get((number, parameter)) for number in self.names)
            if found := [gradient for gradient in uses if gradient is not None]:
                parameter.grad = reduce(torch.add, found)
        self.gradients.clear()

    def begin_step(self, depth: int) -> None:
        """The next step leaves `depth` older versions in use, one of them the latest if any."""
        self._forget(depth)
        if depth:
            for parameter in self.parameters:
                parameter.data = parameter.data.clone()

    def end_step(self, depth: int) -> None:
        """There is a new latest version, in the parameters' own memory."""
        self.latest += 1
        self.kept[self.latest] = self._doubles() if depth else self.kept.pop(self.latest - 1)

    def skip_step(self, depth: int) -> None:
        """The new version is the old one."""
        self._forget(depth)
        self.latest += 1
        self.kept[self.latest] = self.kept[self.latest - 1]

    def _forget(self, depth: int) -> None:
        """What nobody uses any more when there is a version after the latest."""
        for version in [v for v in self.kept if v <= self.latest - depth]:
            if version < self.latest:
                del self.kept[version]

    @property
    def num_bytes(self) -> int:
        """Of all versions, each memory once."""
        kept = list(self.kept.values())  # at once: another thread may step
        tensors = (double for version in kept for double in version.by_use.values())
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        return sum(storages.values())

    def _doubles(self) -> Version:
        by_layer: dict[int, dict[str, Tensor]] = {}
        by_use = {}
        for number, names in self.names.items():
            by_layer[number] = {}
            for parameter, found in names.items():
                # from `data`: what a step does to the parameter must not look like a change of it
                double = nn.Parameter(parameter.data, requires_grad=True)
                double._backward_hooks = parameter._backward_hooks  # noqa: SLF001  of the user's
                by_layer[number] |= dict.fromkeys(found, double)
                by_use[number, parameter] = double
        return Version(by_layer, by_use)


def _names(module: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Of the weights that are trained; the others do not change."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            names.setdefault(parameter, []).append(name)
    return names
