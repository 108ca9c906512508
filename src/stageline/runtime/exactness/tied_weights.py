"""Weights that several layers share: each layer computes with an alias of its own.

On one device the aliases of a weight are in the same memory. Gradients accumulate in the aliases,
micro-batch by micro-batch, whichever rank a layer is on and whenever it runs. Once a step they are
added in the order of the layers. So the sum has the same bits however the model is cut, and the
optimizer sees one parameter.

A weight with hooks is different: in a plain loop its hooks see the gradient of each micro-batch,
summed over all uses. So the gradients of such a weight's aliases are kept by micro-batch. At the
end of the step autograd takes their sums to the weight, one by one, which calls the hooks.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from stageline.errors import ModelError
from stageline.model.layers import LayerSequence
from stageline.model.named_places import named_places
from stageline.runtime.accelerators.accelerator import Accelerator
from stageline.runtime.accelerators.carry import carried
from stageline.runtime.exactness.gradient_types import adopt_gradient_type
from stageline.runtime.exactness.weight_aliases import make_alias, plain_data
from stageline.runtime.stage import autograd
from stageline.torch_private import has_gradient_hooks

NO_ACCELERATORS: Mapping[int, Accelerator | None] = MappingProxyType({})
Ends = tuple[Accelerator | None, Accelerator | None]  # where a weight is, and where an alias is
LayerAliases = tuple[tuple[int, nn.Parameter], ...]  # a layer's number, and its alias of a weight


@dataclass(frozen=True)
class TiedWeights:
    """The aliases, by layer under their names in its module, and by weight.

    State: the weights that have hooks in this step, and the gradients of their aliases by
    micro-batch.
    """

    by_layer: Mapping[int, dict[str, torch.Tensor]]
    by_weight: tuple[tuple[nn.Parameter, LayerAliases], ...]
    ends: Mapping[nn.Parameter, Ends]  # by alias
    hooked: set[nn.Parameter] = field(default_factory=set)
    gradients_by_microbatch: dict[nn.Parameter, dict[int, Tensor]] = field(default_factory=dict)

    @staticmethod
    def of(
        layers: LayerSequence, accelerators: Mapping[int, Accelerator | None] = NO_ACCELERATORS
    ) -> TiedWeights:
        """Make the aliases, each on the accelerator of its layer."""
        by_layer: dict[int, dict[str, torch.Tensor]] = {}
        ends: dict[nn.Parameter, Ends] = {}
        by_weight = []
        for weight, uses in _uses(layers).items():
            if len(uses) > 1:
                aliases = []
                source = next((accelerators[n] for n, _ in uses if n in accelerators), None)
                for number, names in uses:
                    between = source, accelerators.get(number, source)
                    data = carried(plain_data(weight), *between)
                    alias = make_alias(weight, data, requires_grad=weight.requires_grad)
                    by_layer.setdefault(number, {}).update(dict.fromkeys(names, alias))
                    aliases.append((number, alias))
                    ends[alias] = between
                by_weight.append((weight, tuple(aliases)))
        _check_modules(layers, by_layer)
        return TiedWeights(by_layer, tuple(by_weight), ends)

    def without_hooked(self) -> TiedWeights:
        """Return those without hooks, for a loop in which autograd itself calls the hooks."""
        hooked = {weight for weight, _ in self.by_weight if has_gradient_hooks(weight)}
        excluded = {alias for w, uses in self.by_weight if w in hooked for _, alias in uses}
        by_layer = {
            number: {name: alias for name, alias in found.items() if alias not in excluded}
            for number, found in self.by_layer.items()
        }
        by_weight = tuple(w for w in self.by_weight if w[0] not in hooked)
        return TiedWeights(by_layer, by_weight, self.ends)

    def refresh(self) -> None:
        """Bring the aliases up to date with their weights before a step, without gradients."""
        self.gradients_by_microbatch.clear()
        self.hooked.clear()
        self.hooked.update(weight for weight, _ in self.by_weight if has_gradient_hooks(weight))
        for weight, aliases in self.by_weight:
            for _, alias in aliases:
                alias.data, alias.grad = carried(weight.data, *self.ends[alias]), None
                alias.requires_grad_(weight.requires_grad)
                adopt_gradient_type(alias, weight)

    def weights(self, layers: LayerSequence) -> Iterator[Tensor]:
        """Yield the weights that layers compute with, aliases included."""
        yield from layers.modules.parameters()
        for aliases in self.by_layer.values():
            yield from aliases.values()

    def store_hooked_gradients(self, layers: Container[int], microbatch: int) -> None:
        """Store what a micro-batch's backward brought to aliases of weights with hooks."""
        if not self.hooked:
            return
        for weight, aliases in self.by_weight:
            for number, alias in aliases:
                if weight in self.hooked and number in layers and alias.grad is not None:
                    found = self.gradients_by_microbatch.setdefault(alias, {})
                    before = found.get(microbatch)  # from the first half of the backward
                    found[microbatch] = alias.grad if before is None else before + alias.grad
                    alias.grad = None

    def gradients(self, layers: Container[int]) -> dict[int, Any]:
        """Return what the aliases of some layers have gathered, by the number of the alias."""
        return {
            position: self.gradients_by_microbatch.get(alias) if is_hooked else alias.grad
            for position, (weight, number, alias, is_hooked) in enumerate(self._aliases())
            if number in layers
        }

    def take_gradients(self, found: Mapping[int, Any], weights: Container[nn.Parameter]) -> None:
        """Replace the gradients that the aliases of these weights have accumulated."""
        for position, (weight, _, alias, is_hooked) in enumerate(self._aliases()):
            if weight in weights and is_hooked:
                self.gradients_by_microbatch[alias] = found[position] or {}
            elif weight in weights:
                alias.grad = found[position]

    def _aliases(self) -> Iterator[tuple[nn.Parameter, int, nn.Parameter, bool]]:
        """Yield each weight, the layer of an alias, the alias, and whether the weight has hooks."""
        for weight, uses in self.by_weight:
            yield from ((weight, number, alias, weight in self.hooked) for number, alias in uses)

    def add_gradients(self, weights: Container[nn.Parameter] | None = None) -> None:
        """Add the gradients of aliases to these weights, or to all of them, at the end of a step.

        Ranks that share memory may each do this for weights of their own at the same time.
        """
        for weight, aliases in self.by_weight:
            if weights is not None and weight not in weights:
                continue
            if weight in self.hooked:
                self._add_by_microbatch(weight, [alias for _, alias in aliases])
            elif found := [alias.grad for _, alias in aliases if alias.grad is not None]:
                _add_sum(weight, found)
            for _, alias in aliases:
                alias.grad = None
                self.gradients_by_microbatch.pop(alias, None)

    def _add_by_microbatch(self, weight: nn.Parameter, aliases: list[nn.Parameter]) -> None:
        """Add one micro-batch after another, each from its last layer to its first.

        A plain loop does the same, and calls the hooks after each micro-batch.
        """
        uses = [self.gradients_by_microbatch.get(alias, {}) for alias in reversed(aliases)]
        for microbatch in sorted({number for use in uses for number in use}):
            _add_sum(weight, [use[microbatch] for use in uses if microbatch in use])


def _add_sum(weight: nn.Parameter, gradients: list[Tensor]) -> None:
    total = reduce(torch.add, (gradient.to(weight.device) for gradient in gradients))
    autograd.backward([autograd.root(weight, total)], [total])


def _uses(layers: LayerSequence) -> dict[nn.Parameter, list[tuple[int, list[str]]]]:
    """Return each weight's layers, with its names in them."""
    uses: dict[nn.Parameter, list[tuple[int, list[str]]]] = {}
    for number, layer in enumerate(layers.layers):
        names: dict[nn.Parameter, list[str]] = {}
        for name, weight in named_places(layer.module):
            if isinstance(weight, nn.Parameter):
                names.setdefault(weight, []).append(name)
        for weight, found in names.items():
            uses.setdefault(weight, []).append((number, found))
    return uses


def _check_modules(layers: LayerSequence, tied: Mapping[int, object]) -> None:
    """Raise ModelError if layers share a module: two ranks cannot replace its weights at once."""
    owners: dict[int, int] = {}
    for number in tied:
        for part in layers.layers[number].module.modules():
            first = owners.setdefault(id(part), number)
            if first != number and any(True for _ in part.parameters(recurse=False)):
                names = layers.layers[first].name, layers.layers[number].name
                raise ModelError(
                    f"layers {names[0]!r} and {names[1]!r} contain the same module, a "
                    f"{type(part).__name__}: give each layer its own module and tie the weights"
                )
