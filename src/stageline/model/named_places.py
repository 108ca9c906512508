"""Name the places of a module's tensors, for calls in which others take their place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from stageline.torch_private import buffer_table, parameter_table


def named_places(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the names of parameters and buffers: each tensor once for each module that has it.

    A module with two names has its tensors under the first. `functional_call` with a tensor under
    both names, or with `tie_weights`, would leave the tensor in the module.
    """
    for path, part in module.named_modules():
        for own, tensor in (*parameter_table(part).items(), *buffer_table(part).items()):
            if tensor is not None:
                yield f"{path}.{own}" if path else own, tensor


@contextmanager
def replaced_parameters(module: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Put tensors in the places of a module's parameters, and the parameters back on leaving.

    `functional_call` does the same, in 75 µs instead of 5 for a single weight.
    """
    before: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for name, tensor in tensors.items():
            path, _, own = name.rpartition(".")
            table: dict[str, Any] = parameter_table(module.get_submodule(path) if path else module)
            before.append((table, own, table[own]))
            table[own] = tensor
        yield
    finally:
        for table, own, parameter in reversed(before):
            table[own] = parameter
