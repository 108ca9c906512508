"""What a pipeline cannot see when it is built, and must not get wrong: weights by other ways.

A weight that layers share, or of which several versions are in use, has doubles that take its place
by its name in the module. A layer that reaches it otherwise, in a plain list or from a function's
surroundings, would compute with the weight itself: with another version, or with a gradient that
goes where nobody expects it, and on another process with a weight that nobody trains. The graph of
a stage's first backward tells which weights it has really used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from stageline.errors import ModelError
from stageline.model.layers import LayerSequence
from stageline.runtime import trees
from stageline.runtime.engine import autograd as engine
from stageline.runtime.engine.stage import Graph, Stage

OF_MODULES = ("_parameters", "_buffers", "_modules")  # where nn.Module keeps what it knows of


class UsedWeights:
    """State: the stages whose graph has been looked at, and weights that no layer has."""

    def __init__(
        self, layers: LayerSequence, stages: Sequence[Stage], depths: Sequence[int]
    ) -> None:
        self.layers, self.stages = layers, stages
        self.depths = depths  # by stage, how many older versions of its weights are in use
        self.seen: set[int] = set()
        self.unnamed: dict[nn.Parameter, int] = {}  # and the stage that uses it

    def look(self, number: int, graph: Graph) -> None:
        """Raise at a stage's first backward if it uses a weight that it should not."""
        if number in self.seen:
            return
        names = {
            parameter: f"{layer.name}.{name}"
            for layer in self.layers
            for name, parameter in layer.module.named_parameters()
        }
        allowed = self._allowed(self.stages[number], graph)
        for weight in _weights(graph):
            if weight in names and weight not in allowed:
                raise ModelError(
                    f"the weight {names[weight]!r} is used, but not by its name in the layer's own "
                    "module, so nothing can take its place where layers share it or older versions "
                    "of it are in use: use it as self.name, or from an nn.ParameterList"
                )
            if weight not in names and weight not in allowed:
                self._look_at_unnamed(number, weight)
        self.seen.add(number)

    def _look_at_unnamed(self, number: int, weight: nn.Parameter) -> None:
        is_shared = self.unnamed.setdefault(weight, number) != number
        if is_shared or self.depths[number]:
            what = "several stages use it" if is_shared else "its older versions would be needed"
            raise ModelError(
                f"a weight of shape {tuple(weight.shape)} is used that is no parameter of any "
                f"layer, but {what}: make it one, by self.name = or in an nn.ParameterList"
            )

    def _allowed(self, stage: Stage, graph: Graph) -> set[Tensor]:
        """The doubles of the stage's weights, and those weights that need none."""
        versions = stage.versions.of(graph.version) if stage.versions is not None else {}
        allowed: set[Tensor] = set()
        for bound in stage.bound:
            doubles = versions.get(bound.number) or bound.doubles or {}
            own = bound.layer.module.named_parameters(remove_duplicate=False)
            allowed |= {doubles.get(name, weight) for name, weight in own}
        return allowed


def check_tensors(layers: LayerSequence, why: str) -> None:
    """Raise if a module has a tensor that needs a gradient and is no parameter."""
    for layer in layers:
        for name, module in layer.module.named_modules():
            for attribute, value in vars(module).items():
                if attribute not in OF_MODULES and any(map(_is_learned, _tensors(value))):
                    place = ".".join(part for part in (layer.name, name, attribute) if part)
                    raise ModelError(
                        f"{place!r} requires gradients and is no parameter, but {why}: make it an "
                        "nn.Parameter"
                    )


def check_shared_norms(layers: LayerSequence, parts: Sequence[range]) -> None:
    """Raise if stages would move the running statistics of one module at the same time."""
    owners: dict[nn.Module, tuple[int, str]] = {}
    for stage, numbers in enumerate(parts):
        for layer in layers.layers[numbers.start : numbers.stop]:
            for module in layer.module.modules():
                first, name = owners.setdefault(module, (stage, layer.name))
                is_moved = isinstance(module, _NormBase) and module.track_running_stats
                if first != stage and is_moved:
                    raise ModelError(
                        f"layers {name!r} and {layer.name!r} are of different stages and have the "
                        f"same {type(module).__name__}, but its running statistics would be moved "
                        "in another order than by a plain loop: give each its own, or put these "
                        "layers into one stage with balance="
                    )


class SharedBuffers:
    """Buffers that layers of several stages have: a table is fine, a state that they move is not.

    State: what they held before the first step, until that is over.
    """

    def __init__(self, layers: LayerSequence, parts: Sequence[range]) -> None:
        uses: dict[Tensor, dict[int, tuple[str, nn.Module, str]]] = {}
        for stage, numbers in enumerate(parts):
            for layer in layers.layers[numbers.start : numbers.stop]:
                for prefix, module in layer.module.named_modules():
                    for name, buffer in module.named_buffers(recurse=False):
                        place = ".".join(part for part in (layer.name, prefix, name) if part)
                        uses.setdefault(buffer, {}).setdefault(stage, (place, module, name))
        self.places = [next(iter(found.values())) for found in uses.values() if len(found) > 1]
        self.before: list[Tensor] = []

    def note(self) -> None:
        """Before the first step."""
        self.before = [_buffer(module, name).clone() for _, module, name in self.places]

    def compare(self) -> None:
        """After it: raise if a layer has changed one of them."""
        pairs = zip(self.places, self.before, strict=True)
        changed = [
            place for (place, module, name), old in pairs if not _is_as(_buffer(module, name), old)
        ]
        if changed:
            raise ModelError(
                f"the buffer {changed[0]!r} was changed by a forward, and layers of other stages "
                "have it too, so the order of changes is not that of a plain loop: give each "
                "layer its own, or put these layers into one stage with balance="
            )
        self.places, self.before = [], []


def _buffer(module: nn.Module, name: str) -> Tensor:
    buffer: Tensor = getattr(module, name)
    return buffer.detach()


def _is_as(buffer: Tensor, old: Tensor) -> bool:
    """Whether it holds the same; what is not a number is the same as itself."""
    if buffer.is_meta or buffer.shape != old.shape:
        return buffer.shape == old.shape
    return bool(((buffer == old) | ((buffer != buffer) & (old != old))).all())


def _weights(graph: Graph) -> Iterator[nn.Parameter]:
    """Yield the parameters at the end of a stage's graph, and those whose use was caught."""
    written = [tensor for tree in graph.writes.values() for tensor in trees.tensors(tree)]
    roots = written if graph.loss is None else [*written, graph.loss]
    yield from (root for root in roots if isinstance(root, nn.Parameter) and root.requires_grad)
    for call in graph.calls:
        yield from call.weights
    yield from (leaf for leaf in engine.leaves(roots) if isinstance(leaf, nn.Parameter))


def _tensors(value: Any) -> list[Tensor]:
    try:
        return trees.tensors(value)
    except ModelError:  # it contains itself, so it is no tree of tensors
        return []


def _is_learned(tensor: Tensor) -> bool:
    is_leaf = tensor.is_leaf and tensor.requires_grad
    return is_leaf and not isinstance(tensor, nn.Parameter)
