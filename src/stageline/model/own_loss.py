"""Find the loss that a model computes itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

from torch import Tensor

from stageline.errors import ModelError

NAME = "loss"


def own_loss(output: Any, _: object = None) -> Tensor:
    """Return the loss in a model's output: the output itself, its `loss`, or that of a tuple.

    In a tuple it is the first item, or the only one that is a single number.

    >>> import torch
    >>> own_loss({"loss": torch.tensor(2.0), "logits": torch.zeros(2, 3)})
    tensor(2.)
    """
    if isinstance(output, Mapping):
        found = output.get(NAME)
    elif isinstance(output, tuple | list) and not hasattr(output, NAME):
        numbers = [item for item in output if _is_number(item)]
        found = numbers[0] if numbers and (numbers[0] is output[0] or len(numbers) == 1) else None
    else:
        found = getattr(output, NAME, output)
    if _is_number(found):
        return found
    raise ModelError(
        f"the model returns {_described(output)}, in which there is no loss, and there is no "
        "loss_fn: give labels in the batch, so that the model computes its loss, or give a loss_fn"
    )


def _is_number(item: Any) -> TypeGuard[Tensor]:
    return isinstance(item, Tensor) and item.numel() == 1


def _described(output: Any) -> str:
    if isinstance(output, Tensor):
        return f"a tensor of shape {tuple(output.shape)}"
    names = f" with {', '.join(map(str, output))}" if isinstance(output, Mapping) else ""
    return f"a value of type {type(output).__name__}{names}"
