"""Refuse operations by which Stageline's own code makes the host wait inside a step.

A host that waits queues nothing meanwhile, so that the device runs out of work. Layers, losses and
optimizers are the user's: what they read on the host is not looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from stageline.errors import HostWaitError
from stageline.runtime.accelerators.code_places import Place, calling_code, is_own, runs_user_code


class HostRead(Enum):
    """All that Stageline reads on the host inside a step, with the reason."""

    STATE_IN_THE_FIRST_STEP = "which buffers a layer changes is seen when its stage first runs"
    FINITE_GRADIENTS = "an optimizer of the pipeline's is not stepped if gradients are not finite"
    CLIPPED_AFTER_A_STEP = "whether a step has to be taken back decides what the rank does next"


@runs_user_code
def read_on_host(tensor: Tensor, reason: HostRead) -> float:  # noqa: ARG001  it has to be given
    """Return a number that Python goes on by; the host waits for the device."""
    return float(tensor)


@runs_user_code
def equal_on_host(one: Tensor, other: Tensor, reason: HostRead) -> bool:  # noqa: ARG001  as well
    """Return whether two tensors are equal; the host waits for the device."""
    return torch.equal(one, other)


class HostCopies(TorchFunctionMode):
    """A mode that refuses functions which copy to the host without an operator."""

    REFUSED = frozenset({Tensor.cpu, Tensor.tolist, Tensor.numpy, Tensor.__array__})

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        values = (*args, *(kwargs or {}).values())
        to_host = func is Tensor.to and any(isinstance(v, str) and v == "cpu" for v in values)
        if to_host or func in self.REFUSED:
            refuse_wait(func.__name__)
        return func(*args, **(kwargs or {}))


def refuse_wait(what: str) -> None:
    """Raise if the calling line of the runtime gives no reason for making the host wait."""
    if is_own():
        raise HostWaitError(
            f"{Place(what, calling_code(), None)} makes the host wait for a device inside a step: "
            "compute on the device, or read it after the step"
        )
