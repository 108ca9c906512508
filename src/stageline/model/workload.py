"""A model with its loss and a mini-batch: all that is needed to profile or verify it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from stageline.errors import ModelError


class Workload(NamedTuple):
    """A model for `sl.Pipeline`, its loss function and one mini-batch of its data.

    A model that computes its own loss has neither a `loss_fn` nor a target.
    """

    model: Any
    loss_fn: Callable[[Any, Any], Any] | None
    inputs: Any
    target: Any

    @staticmethod
    def of(returned: Any) -> Workload:
        """Return the workload that a user's function returned: all four, or model and inputs."""
        if isinstance(returned, tuple) and len(returned) == 2:
            return Workload(returned[0], None, returned[1], None)
        if not isinstance(returned, tuple) or len(returned) != len(Workload._fields):
            is_tuple = isinstance(returned, tuple)
            found = f"{len(returned)} values" if is_tuple else f"a {type(returned).__name__}"
            raise ModelError(
                f"the function returned {found}, but has to return a tuple of "
                f"{', '.join(Workload._fields)}; or of model and inputs, if the model computes its "
                "own loss"
            )
        if returned[1] is not None and not callable(returned[1]):
            raise ModelError(
                f"loss_fn is {returned[1]!r}, but has to be a function of output and target"
            )
        return Workload(*returned)
