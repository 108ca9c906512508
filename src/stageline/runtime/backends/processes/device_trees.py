"""Gather, broadcast and transfer trees of tensors that are on devices.

What describes a tree travels over gloo. Then its tensors follow, in the group's backend for
where they are: NCCL, say, or gloo for a step counter in host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stageline.model import trees
from stageline.runtime.backends.processes import exchange
from stageline.runtime.backends.processes.channels.tensor_forms import TensorForm, bytes_to_send
from stageline.runtime.backends.processes.messages.shapes import ValueSpec

Described = tuple[Any, tuple[TensorForm, ...]]


def gather_trees(
    own: Any, group: dist.ProcessGroup, device: torch.device, what: str = ""
) -> list[Any]:
    """Return the trees of all ranks of the group, by rank."""
    described: list[Described] = exchange.gather(own, group, _described, what)
    sizes = [[form.num_bytes for form in forms if form.num_elements] for _, forms in described]
    longest = max(map(sum, sizes))
    found = [torch.empty(longest, dtype=torch.uint8, device=device) for _ in described]
    if longest:
        padded = torch.zeros(longest, dtype=torch.uint8, device=device)
        rank = dist.get_rank(group)
        pieces = torch.split(padded[: sum(sizes[rank])], sizes[rank])
        for piece, part in zip(pieces, _parts(own, described[rank]), strict=True):
            piece.copy_(part)
        dist.all_gather(found, padded, group)
    return [
        _received(each, device, _reading(buffer, lengths))
        for each, buffer, lengths in zip(described, found, sizes, strict=True)
    ]


def broadcast_tree(tree: Any, source: int, group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return the tree of the rank `source` of the group, without gradients."""
    root = dist.get_global_rank(group, source)
    described = exchange.broadcast(tree, source, group, _described)
    if dist.get_rank(group) == source:
        for part in _parts(tree, described):
            dist.broadcast(part, root, group)
        return trees.map_leaves(trees.detached, tree)
    found = _received(described, device, lambda part: dist.broadcast(part, root, group))
    return trees.map_leaves(trees.detached, found)


def send_tree(tree: Any, target: int, group: dist.ProcessGroup) -> None:
    """Send a tree to the rank `target` of the group, which calls `receive_tree`."""
    peer = dist.get_global_rank(group, target)
    exchange.send(tree, target, group, _described)
    for part in _parts(tree, _described(tree)):
        dist.send(part, peer, group)


def receive_tree(source: int, group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return the tree that the rank `source` of the group sends."""
    peer = dist.get_global_rank(group, source)
    described = exchange.receive(source, group)
    return _received(described, device, lambda part: dist.recv(part, peer, group))


def _described(tree: Any) -> Described:
    return ValueSpec.of(tree).description, tuple(map(TensorForm.of, trees.tensors(tree)))


def _parts(tree: Any, described: Described) -> Iterator[Tensor]:
    """Yield the bytes of the tensors that have any."""
    for tensor, form in zip(trees.tensors(tree), described[1], strict=True):
        if form.num_elements:
            yield bytes_to_send(tensor, form)


def _reading(buffer: Tensor, sizes: list[int]) -> Callable[[Tensor], object]:
    """Return a function that takes the bytes of one tensor after another out of a buffer."""
    pieces = iter(torch.split(buffer[: sum(sizes)], sizes))
    return lambda part: part.copy_(next(pieces))


def _received(
    described: Described, device: torch.device, receive: Callable[[Tensor], object]
) -> Any:
    description, forms = described
    tensors = []
    for form in forms:
        memory = form.memory(device)
        if form.num_elements:
            receive(form.bytes_in(memory))
        tensors.append(form.tensor_in(memory))
    return ValueSpec.from_description(description).rebuild(tensors)
