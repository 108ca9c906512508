"""Weights that several layers use: each layer gets a double of its own, on one device with the
same memory.

Gradients gather in the doubles, micro-batch by micro-batch, whichever rank a layer is on and
whenever it runs. Once a step they are added up in the order of the layers. So the sum has the same
bits however the model is cut, and the optimizer sees one parameter.

A weight with hooks is another matter: in a plain loop they see the gradient of each micro-batch,
the sum of all uses. So the gradients of such a weight's doubles are put aside by micro-batch. At
the end of the step autograd takes their sums to the weight, one by one, which calls the hooks.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce
from types import MappingProxyType

import torch
from torch import Tensor, nn

from stageline.errors import ModelError
from stageline.model.layers import LayerSequence
from stageline.runtime.engine import autograd as engine
from stageline.runtime.exactness.weight_aliases import data_of, double_of, is_hooked

NOWHERE: Mapping[int, torch.device | None] = MappingProxyType({})


@dataclass(frozen=True)
class TiedWeights:
    """By layer the doubles under their names in its module; by weight the layers and doubles.

    State: the weights that have hooks in this step, and the gradients of their doubles by
    micro-batch.
    """

    by_layer: Mapping[int, dict[str, torch.Tensor]]
    by_weight: tuple[tuple[nn.Parameter, tuple[tuple[int, nn.Parameter], ...]], ...]
    hooked: set[nn.Parameter] = field(default_factory=set)
    apart: dict[nn.Parameter, dict[int, Tensor]] = field(default_factory=dict)  # by double

    @staticmethod
    def of(
        layers: LayerSequence, devices: Mapping[int, torch.device | None] = NOWHERE
    ) -> TiedWeights:
        """`devices`: of layers by their number, where they are not all in one place."""
        uses: dict[nn.Parameter, list[tuple[int, list[str]]]] = {}
        for number, layer in enumerate(layers.layers):
            names: dict[nn.Parameter, list[str]] = {}
            for name, weight in layer.module.named_parameters(remove_duplicate=False):
                names.setdefault(weight, []).append(name)
            for weight, found in names.items():
                uses.setdefault(weight, []).append((number, found))
        by_layer: dict[int, dict[str, torch.Tensor]] = {}
        by_weight = []
        for weight, places in uses.items():
            if len(places) > 1:
                doubles = []
                for number, found in places:
                    here = data_of(weight).to(devices.get(number) or weight.device)
                    double = double_of(weight, here, requires_grad=weight.requires_grad)
                    by_layer.setdefault(number, {}).update(dict.fromkeys(found, double))
                    doubles.append((number, double))
                by_weight.append((weight, tuple(doubles)))
        _check_modules(layers, by_layer)
        return TiedWeights(by_layer, tuple(by_weight))

    def without_hooked(self) -> TiedWeights:
        """Return those without hooks, for a loop in which autograd itself calls the hooks."""
        hooked = {weight for weight, _ in self.by_weight if is_hooked(weight)}
        doubles = {d for w, uses in self.by_weight if w in hooked for _, d in uses}
        by_layer = {
            number: {name: d for name, d in found.items() if d not in doubles}
            for number, found in self.by_layer.items()
        }
        return TiedWeights(by_layer, tuple(w for w in self.by_weight if w[0] not in hooked))

    def refresh(self) -> None:
        """Before a step: the doubles follow what was done to the weights, and hold nothing."""
        self.apart.clear()
        self.hooked.clear()
        self.hooked.update(weight for weight, _ in self.by_weight if is_hooked(weight))
        for weight, doubles in self.by_weight:
            for _, double in doubles:
                double.data, double.grad = weight.data.to(double.device), None
                double.requires_grad_(weight.requires_grad)

    def weights(self, layers: LayerSequence) -> Iterator[Tensor]:
        """Yield the weights that layers compute with, doubles included."""
        yield from layers.modules.parameters()
        for doubles in self.by_layer.values():
            yield from doubles.values()

    def put_aside(self, layers: Container[int], microbatch: int) -> None:
        """After a backward of a micro-batch in these layers, for weights with hooks."""
        for weight, doubles in self.by_weight:
            for number, double in doubles:
                if weight in self.hooked and number in layers and double.grad is not None:
                    found = self.apart.setdefault(double, {})
                    before = found.get(microbatch)  # from the first half of the backward
                    found[microbatch] = double.grad if before is None else before + double.grad
                    double.grad = None

    def add_gradients(self, weights: Container[nn.Parameter] | None = None) -> None:
        """At the end of a step: from the doubles to these weights, or to all of them."""
        for weight, doubles in self.by_weight:
            if weights is not None and weight not in weights:
                continue
            if weight in self.hooked:
                self._add_by_microbatch(weight, [double for _, double in doubles])
            elif found := [double.grad for _, double in doubles if double.grad is not None]:
                total = reduce(torch.add, (gradient.to(weight.device) for gradient in found))
                engine.backward([engine.root(weight, total)], [total])
            for _, double in doubles:
                double.grad = None
                self.apart.pop(double, None)

    def _add_by_microbatch(self, weight: nn.Parameter, doubles: list[nn.Parameter]) -> None:
        """As a plain loop does: in a micro-batch the last layer's first, then hooks, then on."""
        uses = [self.apart.get(double, {}) for double in reversed(doubles)]
        for microbatch in sorted({number for use in uses for number in use}):
            found = (use[microbatch] for use in uses if microbatch in use)
            total = reduce(torch.add, (gradient.to(weight.device) for gradient in found))
            engine.backward([engine.root(weight, total)], [total])


def _check_modules(layers: LayerSequence, tied: Mapping[int, object]) -> None:
    """Two ranks cannot put their doubles into one and the same module at a time."""
    owners: dict[int, int] = {}
    for number in tied:
        for part in layers.layers[number].module.modules():
            first = owners.setdefault(id(part), number)
            if first != number and any(True for _ in part.parameters(recurse=False)):
                names = layers.layers[first].name, layers.layers[number].name
                raise ModelError(
                    f"layers {names[0]!r} and {names[1]!r} contain the same module, a "
                    f"{type(part).__name__}: give each its own, with the same weights"
                )
