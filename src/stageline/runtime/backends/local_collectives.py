"""Collectives of a single process that has all ranks: there is nothing to exchange."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from stageline.runtime.backends.backend import Group

T = TypeVar("T")


class LocalCollectives:
    """All ranks are in this process."""

    replica = 0
    num_replicas = 1
    is_first = is_first_part = is_first_sibling = True
    device: torch.device | None = None

    def has(self, rank: int) -> bool:  # noqa: ARG002
        return True

    def size(self, group: Group) -> int:  # noqa: ARG002
        return 1

    def gather(
        self,
        own: T,
        what: str,  # noqa: ARG002
        group: Group = Group.PIPELINE,  # noqa: ARG002
        task: str | None = None,  # noqa: ARG002
    ) -> list[T]:
        return [own]

    def broadcast(self, tree: T, source: int, what: str) -> T:  # noqa: ARG002
        return tree

    def all_reduce(self, tensor: Tensor, what: str, group: Group) -> Callable[[], Tensor]:  # noqa: ARG002
        return lambda: tensor

    def shared_sum(self, parameters: Sequence[nn.Parameter]) -> None:
        """Return None: there are no replicas."""

    def all_gather(self, tensor: Tensor, what: str, group: Group) -> Callable[[], list[Tensor]]:  # noqa: ARG002
        return lambda: [tensor]

    def transfer(self, tree: Any, source: int, target: int, what: str) -> Any:  # noqa: ARG002
        return tree

    def guarded(self, what: str, task: str | None = None) -> AbstractContextManager[None]:  # noqa: ARG002
        return nullcontext()

    def busy(self, task: str) -> AbstractContextManager[None]:  # noqa: ARG002
        return nullcontext()

    def reporting(self) -> AbstractContextManager[None]:
        return nullcontext()
