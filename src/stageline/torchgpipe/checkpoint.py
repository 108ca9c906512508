"""Tell a layer's forward whether it will be recomputed, or is being recomputed."""

from __future__ import annotations

from stageline.runtime.stage.forward_kind import ForwardKind, running_forward

__all__ = ["is_checkpointing", "is_recomputing"]


def is_checkpointing() -> bool:
    """Return whether the forward that runs here keeps no activations and will run again."""
    return running_forward() is ForwardKind.FIRST


def is_recomputing() -> bool:
    """Return whether the forward that runs here repeats an earlier one for its backward.

    Attributes, buffers and random numbers of a layer need no such test: Stageline restores them.
    It is for effects outside of the layer, such as a log.
    """
    return running_forward() is ForwardKind.AGAIN
