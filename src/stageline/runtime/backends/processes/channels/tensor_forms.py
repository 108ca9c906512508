"""The form of a tensor: all that another process needs to know to receive it, but its numbers.

Tensors travel as the bytes of their memory, in one operation each. One that is dense is sent as it
is, transposed or not; of another, as a column or an expanded one, a dense copy is sent. The
receiver gives it the strides and the alignment that it had: the last bits of results depend on
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from stageline.runtime.exactness.strided_copy import copy_as, misalignment


class TensorForm(NamedTuple):
    """All of a tensor but its numbers."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...]
    lead: int  # how many elements after an aligned address it begins
    needs_gradient: bool
    is_aliased: bool  # another tensor of its message is in the same memory
    is_on_host: bool

    @staticmethod
    def of(tensor: Tensor, *, is_aliased: bool = False) -> TensorForm:
        return TensorForm(
            tuple(tensor.shape),
            tensor.dtype,
            tensor.stride(),
            misalignment(tensor),
            tensor.requires_grad,
            is_aliased,
            tensor.device.type == "cpu",
        )

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize

    @property
    def is_dense(self) -> bool:
        """Return whether the tensor covers all of its memory, in whatever order of dimensions."""
        reach = 1
        for step, size in sorted(zip(self.stride, self.shape, strict=True)):
            if size > 1:
                if step != reach:
                    return False
                reach *= size
        return True

    def memory(self, device: torch.device) -> Tensor:
        """Return memory to receive such a tensor into, with what comes before it."""
        where = torch.device("cpu") if self.is_on_host else device
        lead = self.lead if self.is_dense else 0
        return torch.empty(lead + self.num_elements, dtype=self.dtype, device=where)

    def bytes_in(self, memory: Tensor) -> Tensor:
        """Return the part of the memory to receive into."""
        count = self.num_elements
        return memory.narrow(0, len(memory) - count, count).view(torch.uint8)

    def tensor_in(self, memory: Tensor) -> Tensor:
        """Return the tensor that has been received into the memory."""
        if self.is_dense:
            # `data` counts changes in place for itself
            found = memory.as_strided(self.shape, self.stride, self.lead).data
        else:
            found = copy_as(memory.view(self.shape), self.stride, self.lead)
        return found.requires_grad_(self.needs_gradient)


def bytes_to_send(tensor: Tensor, form: TensorForm) -> Tensor:
    """Return the bytes of a tensor in their order in memory, of a dense copy if need be."""
    plain = tensor.detach()
    if form.is_dense and not (plain.is_conj() or plain.is_neg()):
        flat = plain.as_strided((form.num_elements,), (1,), plain.storage_offset())
    else:
        flat = torch.empty(form.num_elements, dtype=form.dtype, device=plain.device)
        dense = flat.as_strided(form.shape, form.stride) if form.is_dense else flat.view(form.shape)
        dense.copy_(plain)
    return flat.view(torch.uint8)


def changes_between(before: Sequence[TensorForm | None], now: Sequence[TensorForm | None]) -> str:
    """Return in words how the first tensor that differs does."""
    for number, (one, other) in enumerate(zip(before, now, strict=False)):
        if one is None or other is None:
            if one is not other:
                words = ("none", "one") if one is None else ("one", "none")
                return f"tensor {number}: there was {words[0]}, and now there is {words[1]}"
            continue
        for name, then, here in zip(TensorForm._fields, one, other, strict=True):
            if then != here:
                return f"tensor {number}: its {name} was {then}, and is now {here}"
    return f"it had {len(before)} tensors, and now has {len(now)}"
