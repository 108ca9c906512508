"""What a model's own loss is a mean over: tokens that are not ignored, or samples.

The mean over a mini-batch is the mean of its micro-batches, weighted by how many they count. A
recorded forward shows its cross-entropy, so the number is known when a micro-batch arrives. Where
the loss has none, or several, micro-batches are weighted by their samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import wraps
from inspect import signature
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from stageline.model.recording.interception.tape_recorder import LOSSES
from stageline.model.recording.segments import CutTape
from stageline.model.recording.tape import Operation, ValueRef

MEAN, SUM = "mean", "sum"
FUNCTIONS = LOSSES
MODULES = {nn.CrossEntropyLoss: functional.cross_entropy, nn.NLLLoss: functional.nll_loss}


@dataclass(frozen=True)
class LossCount:
    """The targets that a loss counts, and whether it is their sum already."""

    operation: Operation
    target: str  # the name of a value that depends on the batch alone
    ignore_index: int
    is_sum: bool

    def of(self, values: Mapping[str, Any]) -> float:
        """Return the number of targets in a micro-batch."""
        target: Tensor = values[self.target]
        return float((target != self.ignore_index).sum())


def find_loss_count(cut: CutTape, modules: Mapping[str, nn.Module]) -> LossCount | None:
    """Return what the only cross-entropy of a forward counts."""
    operations = [each for segment in cut.segments for each in segment.operations]
    found = [each for each in operations if _function(each, modules) is not None]
    return _loss_count(found[0], cut, modules) if len(found) == 1 else None


def _function(operation: Operation, modules: Mapping[str, nn.Module]) -> Callable[..., Any] | None:
    if operation.module is not None:
        return MODULES.get(type(modules[operation.module]))
    return next((func for func in FUNCTIONS if func is operation.target), None)


def _loss_count(
    operation: Operation, cut: CutTape, modules: Mapping[str, nn.Module]
) -> LossCount | None:
    func = _function(operation, modules)
    assert func is not None
    args, kwargs = operation.arguments.fill(_References(), ValueRef)
    bound = signature(func).bind(*args, **kwargs)
    bound.apply_defaults()
    given = dict(bound.arguments)
    if operation.module is not None:
        own = modules[operation.module]
        names = ("ignore_index", "reduction", "weight")
        given |= {name: getattr(own, name) for name in names}
    target = given["target"]
    is_counted = isinstance(target, ValueRef) and target.name in cut.inputs
    if not is_counted or given["weight"] is not None or given["reduction"] not in (MEAN, SUM):
        return None
    return LossCount(operation, target.name, given["ignore_index"], given["reduction"] == SUM)


class _References(dict[str, Any]):
    """Values that are references to themselves."""

    def __missing__(self, name: str) -> ValueRef:
        return ValueRef(name)


def without_targets(cut: CutTape, count: LossCount, modules: Mapping[str, nn.Module]) -> CutTape:
    """Return the tape for a micro-batch that counts nothing: its loss is 0, not 0 / 0."""
    func = _function(count.operation, modules)
    assert func is not None
    changed = replace(count.operation, target=_summed(func))
    segments = tuple(
        replace(
            segment,
            operations=tuple(
                changed if each is count.operation else each for each in segment.operations
            ),
        )
        for segment in cut.segments
    )
    return replace(cut, segments=segments)


def _summed(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return a loss function that adds where it would take the mean."""

    @wraps(func)
    def summed(*args: Any, **kwargs: Any) -> Any:
        bound = signature(func).bind(*args, **kwargs)
        bound.arguments["reduction"] = SUM
        return func(*bound.args, **bound.kwargs)

    return summed
