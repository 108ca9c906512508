"""Run a forward again before its backward, from the inputs, target and state of the first time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from stageline.errors import ModelError
from stageline.model import trees
from stageline.runtime.exactness.layer_state import StateSnapshot
from stageline.runtime.stage.stage_values import ForwardArgs, RecomputationInput
from stageline.torch_private import version_of


class Recomputation:
    """State: the loss functions that were seen to leave their target unchanged."""

    def __init__(self) -> None:
        self.pure_losses: set[object] = set()

    def keep(self, args: ForwardArgs, state: StateSnapshot) -> RecomputationInput:
        """Return what a second forward needs, before the first one runs.

        A loss may change its target in place, as a layer may change its inputs.
        """
        target, versions = args.target, list[int]()
        if target is not None:
            versions = _versions([target.target])
            if target.loss_fn not in self.pure_losses:
                target = replace(target, target=trees.map_leaves(trees.cloned, target.target))
        args_again = args._replace(target=target)
        return RecomputationInput(args_again, _versions(args.values.values()), versions, state)

    def check_target(self, args: ForwardArgs, kept: RecomputationInput) -> None:
        """Remember a loss that left its target unchanged: it is not cloned again.

        Raise ModelError if it changed a target that was not cloned.
        """
        if args.target is None:
            return
        if _versions([args.target.target]) == kept.target_versions:
            self.pure_losses.add(args.target.loss_fn)
        elif kept.args.target is args.target:
            self.pure_losses.discard(args.target.loss_fn)
            raise ModelError(
                "the loss changed its target in place, but not when it first ran, and it has to be "
                "computed again from the old one: run the step again, or change a clone"
            )


def check_inputs(kept: RecomputationInput) -> None:
    """Raise ModelError if an input was changed in place since the first forward."""
    if _versions(kept.args.values.values()) != kept.versions:
        raise ModelError(
            "an input was changed in place between its forward and its backward, but the forward "
            "is to be recomputed from it: change a clone, or change it after the backward"
        )


def _versions(values: Iterable[Any]) -> list[int]:
    return [version_of(tensor) for tree in values for tensor in trees.tensors(tree)]
