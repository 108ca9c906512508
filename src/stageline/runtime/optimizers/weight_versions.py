"""The versions of a stage's weights that micro-batches in flight still use.

    version 5    the parameters' own memory, which the next step changes
    version 4    the memory that the parameters had before step 5, as long as it is in use
    version 3    …

Versions are copied on write: a step whose weights are still in use moves the parameters to a copy
and leaves the old memory as it is. Layers compute with aliases of the parameters, which share the
memory of a version, so autograd's graphs refer to the version and not to the updated parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial, reduce
from typing import NamedTuple

import torch
from torch import Tensor, nn

from stageline.errors import ModelError
from stageline.model.named_places import named_places
from stageline.runtime.exactness.weight_aliases import (
    apply_gradient_hooks,
    make_alias,
    plain_data,
    run_post_hooks,
)
from stageline.torch_private import has_gradient_hooks

Use = tuple[int, nn.Parameter]  # the number of a layer, and one of its weights


class Version(NamedTuple):
    """The aliases of all weights in one version: by layer and name, and by use.

    A weight with hooks has one alias, under its first use: hooks see the sum of all uses in a
    micro-batch. `followed` are the weights whose aliases call their hooks.
    """

    by_layer: dict[int, dict[str, Tensor]]
    by_use: dict[Use, nn.Parameter]
    followed: set[nn.Parameter]


class Versions:
    """Keeps versions in use. State: these, and the gradients for the next step."""

    def __init__(self, modules: Mapping[int, nn.Module]) -> None:
        self.names = {number: _names(module) for number, module in modules.items()}
        self.parameters = list(dict.fromkeys(p for each in self.names.values() for p in each))
        self.latest = 0
        self.kept = {0: self._aliases()}
        self.gradients: dict[Use, Tensor] = {}

    def of(self, version: int) -> dict[int, dict[str, Tensor]]:
        """Return the aliases that replace each layer's weights, with the weights' current hooks."""
        kept = self.kept[version]
        for (number, parameter), alias in kept.by_use.items():
            if alias.requires_grad != parameter.requires_grad:
                alias.requires_grad_(parameter.requires_grad)
            if has_gradient_hooks(parameter) and parameter not in kept.followed:
                if any(use[1] is parameter and use[0] != number for use in kept.by_use):
                    raise ModelError(
                        "a hook was registered on a weight that several layers use while a stream "
                        "is running: register it before the stream begins"
                    )
                self._follow(parameter, alias, kept.followed)
        return kept.by_layer

    @contextmanager
    def gathering(self, version: int) -> Iterator[None]:
        """Enclose a backward, which adds to the gradients of earlier micro-batches."""
        aliases = self.kept[version].by_use
        for use, alias in aliases.items():
            alias.grad = self.gradients.get(use)
        yield
        for use, alias in aliases.items():
            if alias.grad is not None:
                self.gradients[use], alias.grad = alias.grad, None

    def hand_over(self) -> None:
        """Move the gradients to the parameters; add several uses of a weight in layer order."""
        for parameter in self.parameters:
            uses = (self.gradients.get((number, parameter)) for number in self.names)
            if found := [gradient for gradient in uses if gradient is not None]:
                parameter.grad = reduce(torch.add, found)
        self.gradients.clear()

    def begin_step(self, depth: int) -> None:
        """Prepare for a step; `depth` older versions, including the latest, stay in use."""
        self._drop_unused(depth)
        if depth:
            for parameter in self.parameters:
                parameter.data = parameter.data.clone()

    def end_step(self, depth: int) -> None:
        """Add the new latest version, which has the parameters' own memory."""
        self.latest += 1
        self.kept[self.latest] = self._aliases() if depth else self.kept.pop(self.latest - 1)

    def skip_step(self, depth: int) -> None:
        """Add a new version that is the same as the latest."""
        self._drop_unused(depth)
        self.latest += 1
        self.kept[self.latest] = self.kept[self.latest - 1]

    def _drop_unused(self, depth: int) -> None:
        """Delete versions that are no longer in use once there is one after the latest."""
        for version in [v for v in self.kept if v <= self.latest - depth]:
            if version < self.latest:
                del self.kept[version]

    @property
    def num_bytes(self) -> int:
        """The bytes of all versions; shared memory counts once."""
        kept = list(self.kept.values())  # a copy: another thread may step
        tensors = (alias for version in kept for alias in version.by_use.values())
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        return sum(storages.values())

    def _aliases(self) -> Version:
        version = Version({number: {} for number in self.names}, {}, set())
        shared: dict[nn.Parameter, nn.Parameter] = {}
        for number, names in self.names.items():
            for parameter, found in names.items():
                alias = shared.get(parameter)
                if alias is None:
                    # from `data`: a step must not count as an in-place change of the alias
                    data = plain_data(parameter).data
                    alias = make_alias(parameter, data, requires_grad=parameter.requires_grad)
                    version.by_use[number, parameter] = alias
                    if has_gradient_hooks(parameter):
                        shared[parameter] = alias
                        self._follow(parameter, alias, version.followed)
                version.by_layer[number] |= dict.fromkeys(found, alias)
        return version

    def _follow(
        self, parameter: nn.Parameter, alias: nn.Parameter, followed: set[nn.Parameter]
    ) -> None:
        """Make an alias call the hooks that its parameter has when a gradient arrives."""
        alias.register_hook(partial(apply_gradient_hooks, parameter))  # type: ignore[no-untyped-call]
        alias.register_post_accumulate_grad_hook(partial(run_post_hooks, parameter))  # type: ignore[no-untyped-call]
        followed.add(parameter)


def _names(module: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Return the names of each trained weight; others have no versions."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in named_places(module):
        if isinstance(parameter, nn.Parameter) and parameter.requires_grad:
            names.setdefault(parameter, []).append(name)
    return names
