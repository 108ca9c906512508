"""Weights that several layers use: each layer gets a double of its own, on one device with the
same memory.

Gradients gather in the doubles, micro-batch by micro-batch, whichever rank a layer is on and
whenever it runs. Once a step they are added up in the order of the layers. So the sum has the same
bits however the model is cut, and the optimizer sees one parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from types import MappingProxyType

import torch
from torch import nn

from stageline.errors import ModelError
from stageline.model.layers import LayerSequence

NOWHERE: Mapping[int, torch.device | None] = MappingProxyType({})


@dataclass(frozen=True)
class TiedWeights:
    """By layer the doubles under their names in its module; by weight the layers and doubles."""

    by_layer: Mapping[int, dict[str, torch.Tensor]]
    by_weight: tuple[tuple[nn.Parameter, tuple[tuple[int, nn.Parameter], ...]], ...]

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
                    here = weight.detach().to(devices.get(number) or weight.device)
                    double = nn.Parameter(here, requires_grad=weight.requires_grad)
                    by_layer.setdefault(number, {}).update(dict.fromkeys(found, double))
                    doubles.append((number, double))
                by_weight.append((weight, tuple(doubles)))
        _check_modules(layers, by_layer)
        return TiedWeights(by_layer, tuple(by_weight))

    def refresh(self) -> None:
        """Before a step: the doubles follow what was done to the weights, and hold nothing."""
        for weight, doubles in self.by_weight:
            for _, double in doubles:
                double.data, double.grad = weight.data.to(double.device), None
                double.requires_grad_(weight.requires_grad)

    def add_gradients(self) -> None:
        """At the end of a step: from the doubles to the weights."""
        for weight, doubles in self.by_weight:
            found = [double.grad for _, double in doubles if double.grad is not None]
            if found:
                total = reduce(torch.add, (gradient.to(weight.device) for gradient in found))
                weight.grad = total if weight.grad is None else weight.grad + total
            for _, double in doubles:
                double.grad = None


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
