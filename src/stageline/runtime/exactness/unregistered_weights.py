"""Refuse weights that a layer reaches by other ways than its own module's parameters.

A weight that layers share, or of which several versions are in use, has aliases that take its place
under its name in the module. A layer that reaches it differently, from a plain list or a function's
closure, would compute with the weight itself: with the wrong version, with a gradient that is added
in the wrong place, or in another process with a weight that is not trained. The graph of a stage's
first backward shows which weights it has really used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from stageline.errors import ModelError
from stageline.model import trees
from stageline.model.layers import LayerSequence
from stageline.runtime.stage import autograd
from stageline.runtime.stage.stage import Stage
from stageline.runtime.stage.stage_values import StageGraph
from stageline.torch_private import MODULE_TABLES


class UsedWeights:
    """State: the stages whose graph was checked, and used weights that are in no layer."""

    def __init__(
        self, layers: LayerSequence, stages: Sequence[Stage], depths: Sequence[int]
    ) -> None:
        """Check these stages; `depths` are the numbers of older versions of weights in use."""
        self.layers, self.stages, self.depths = layers, stages, depths
        self.checked: set[int] = set()
        self.unregistered: dict[nn.Parameter, int] = {}  # and the stage that uses it

    def check(self, number: int, graph: StageGraph) -> None:
        """Raise ModelError at a stage's first backward if it uses a weight that it should not."""
        if number in self.checked:
            return
        names = {
            parameter: layer.full_name(name)
            for layer in self.layers
            for name, parameter in layer.module.named_parameters()
        }
        allowed = self._allowed(self.stages[number], graph)
        for weight in _used_weights(graph):
            if weight in names and weight not in allowed:
                raise ModelError(
                    f"the weight {names[weight]!r} is used, but not by its name in the layer's own "
                    "module, so nothing can take its place where layers share it or older versions "
                    "of it are in use: use it as self.name, or from an nn.ParameterList"
                )
            if weight not in names and weight not in allowed:
                self._check_unregistered(number, weight)
        self.checked.add(number)

    def _check_unregistered(self, number: int, weight: nn.Parameter) -> None:
        is_shared = self.unregistered.setdefault(weight, number) != number
        if is_shared or self.depths[number]:
            why = "several stages use it" if is_shared else "its older versions would be needed"
            raise ModelError(
                f"a weight of shape {tuple(weight.shape)} is used that is no parameter of any "
                f"layer, but {why}: register it by self.name = or in an nn.ParameterList"
            )

    def _allowed(self, stage: Stage, graph: StageGraph) -> set[Tensor]:
        """Return the aliases of the stage's weights, and the weights that have none."""
        versions = stage.versions.of(graph.version) if stage.versions is not None else {}
        allowed: set[Tensor] = set()
        for layer in stage.stage_layers:
            aliases = versions.get(layer.number) or layer.aliases or {}
            own = layer.module.named_parameters(remove_duplicate=False)
            allowed |= {aliases.get(name, weight) for name, weight in own}
        return allowed


def check_tensors(layers: LayerSequence, why: str) -> None:
    """Raise ModelError if a module has a tensor that requires gradients and is no parameter."""
    for layer in layers:
        for name, module in layer.module.named_modules():
            for attribute, value in vars(module).items():
                if attribute not in MODULE_TABLES and any(map(_is_trained, _tensors(value))):
                    place = layer.full_name(name, attribute)
                    raise ModelError(
                        f"{place!r} requires gradients and is no parameter, but {why}: make it an "
                        "nn.Parameter"
                    )


def _used_weights(graph: StageGraph) -> Iterator[nn.Parameter]:
    """Yield the parameters that a stage's graph leads to, and those of intercepted calls."""
    written = [tensor for tree in graph.writes.values() for tensor in trees.tensors(tree)]
    roots = written if graph.loss is None else [*written, graph.loss]
    yield from (root for root in roots if isinstance(root, nn.Parameter) and root.requires_grad)
    for call in graph.calls:
        yield from call.weights
    yield from (leaf for leaf in autograd.leaves(roots) if isinstance(leaf, nn.Parameter))


def _tensors(value: Any) -> list[Tensor]:
    try:
        return trees.tensors(value)
    except ModelError:  # it contains itself, so it is no tree of tensors
        return []


def _is_trained(tensor: Tensor) -> bool:
    is_leaf = tensor.is_leaf and tensor.requires_grad
    return is_leaf and not isinstance(tensor, nn.Parameter)
