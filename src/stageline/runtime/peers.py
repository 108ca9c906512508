"""What the processes of a pipeline tell each other beside its messages: losses, norms, outputs.

`Alone` is one process with all ranks, where there is nobody to tell. `Group` has one rank in each
process; all of them make the same calls in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from stageline.runtime import wire
from stageline.runtime.executor import Moment, Step
from stageline.runtime.shapes import Form, Shape
from stageline.runtime.tied import TiedWeights

LOSS_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


Moments = dict[int, list[Moment]]  # by rank


class Peers(Protocol):
    """Who else takes part."""

    def has(self, rank: int) -> bool:
        """Whether this rank is in this process."""

    def losses(self, step: Step) -> Callable[[], list[Tensor]]:
        """How to come by the losses of all micro-batches, when they are wanted."""

    def norms(self, own: Mapping[int, Tensor], count: int) -> list[Tensor]:
        """Those of all parameters that have a gradient, by their number in the model."""

    def output(self, made: Any) -> Any:
        """What the last rank made."""

    def moments(self, own: Moments) -> Moments:
        """Of all ranks."""

    def share_tied(self, tied: TiedWeights, homes: Sequence[int]) -> None:
        """Gradients of weights that layers on several ranks use; `homes` are the layers' ranks."""

    def share_state(self, modules: Iterable[nn.Module], homes: Sequence[int]) -> None:
        """Parameters and buffers of all layers, from the ranks that hold them."""


class Alone:
    """All ranks are here."""

    def has(self, rank: int) -> bool:  # noqa: ARG002  whichever it is
        return True

    def losses(self, step: Step) -> Callable[[], list[Tensor]]:
        losses = [step.losses[i] for i in range(len(step.targets))]
        return lambda: losses

    def norms(self, own: Mapping[int, Tensor], count: int) -> list[Tensor]:  # noqa: ARG002
        return list(own.values())

    def output(self, made: Any) -> Any:
        return made

    def moments(self, own: Moments) -> Moments:
        return own

    def share_tied(self, tied: TiedWeights, homes: Sequence[int]) -> None:
        pass

    def share_state(self, modules: Iterable[nn.Module], homes: Sequence[int]) -> None:
        pass


class Group:
    """One rank is here, the others in the processes of a group."""

    def __init__(self, group: dist.ProcessGroup, last: int) -> None:
        self.group, self.rank = group, dist.get_rank(group)
        self.last = last  # the rank of the last stage, which on a V is not the last rank

    def has(self, rank: int) -> bool:
        return rank == self.rank

    def losses(self, step: Step) -> Callable[[], list[Tensor]]:
        """Sent at once, awaited when they are read: no rank waits for another until then."""
        buffer = torch.zeros(len(step.targets) + 1, dtype=torch.float64)  # a double holds them all
        for microbatch, loss in step.losses.items():
            buffer[microbatch], buffer[-1] = loss.double(), LOSS_TYPES.index(loss.dtype)
        work = dist.broadcast(buffer, self._global(self.last), self.group, async_op=True)

        def fetch() -> list[Tensor]:
            work.wait()
            return list(buffer[:-1].to(LOSS_TYPES[int(buffer[-1])]).unbind())

        return fetch

    def norms(self, own: Mapping[int, Tensor], count: int) -> list[Tensor]:
        """Every number is that of one rank, plus zeros, which change no bit."""
        table = torch.zeros(2, count)
        for number, norm in own.items():
            table[0, number], table[1, number] = norm, 1.0
        dist.all_reduce(table, group=self.group)
        return [norm for norm, is_there in zip(*table, strict=True) if is_there]

    def output(self, made: Any) -> Any:
        shapes: list[Any] = [Shape.of(made) if self.rank == self.last else None]
        dist.broadcast_object_list(shapes, self._global(self.last), self.group)
        shape: Shape = shapes[0]
        leaves = pytree.tree_leaves(made) if self.rank == self.last else shape.leaves
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        found = iter(self._broadcast(tensors, shape.forms, self.last))
        again = [next(found) if isinstance(leaf, Form) else leaf for leaf in shape.leaves]
        return pytree.tree_unflatten(again, shape.tree)

    def moments(self, own: Moments) -> Moments:
        rows: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(rows, own.get(self.rank, []), self.group)
        return dict(enumerate(rows))

    def share_tied(self, tied: TiedWeights, homes: Sequence[int]) -> None:
        for _, uses in tied.by_weight:
            if len({homes[number] for number, _ in uses}) > 1:
                for number, double in uses:
                    forms = [Form.of(double)]
                    double.grad = self._broadcast([double.grad], forms, homes[number])[0]

    def share_state(self, modules: Iterable[nn.Module], homes: Sequence[int]) -> None:
        for module, home in zip(modules, homes, strict=True):
            tensors = [*module.parameters(), *module.buffers()]
            forms = [Form.of(tensor) for tensor in tensors]
            for tensor, found in zip(tensors, self._broadcast(tensors, forms, home), strict=True):
                if home != self.rank and found is not None:
                    tensor.data.copy_(found.detach())

    def _broadcast(
        self, tensors: Sequence[Tensor | None], forms: Sequence[Form], source: int
    ) -> list[Tensor | None]:
        is_here = source == self.rank
        buffer = wire.pack(tensors, forms) if is_here else _empty(forms)
        dist.broadcast(buffer, self._global(source), self.group)
        return [t if t is None else t.detach() for t in wire.unpack(buffer, forms)]

    def _global(self, rank: int) -> int:
        return dist.get_global_rank(self.group, rank)


def _empty(forms: Sequence[Form]) -> Tensor:
    return torch.empty(wire.num_bytes(forms), dtype=torch.uint8)
