"""Broadcast and transfer trees of tensors that are on devices.

What describes a tree travels over gloo. Then each of its tensors follows, in the group's backend
for where it is: NCCL, say, or gloo for a step counter in host memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stageline.model import trees
from stageline.runtime.backends.processes import exchange
from stageline.runtime.backends.processes.channels.tensor_forms import TensorForm, bytes_to_send
from stageline.runtime.backends.processes.messages.shapes import ValueSpec

Described = tuple[Any, tuple[TensorForm, ...]]


def broadcast_tree(tree: Any, source: int, group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return the tree of the rank `source` of the group, without gradients."""
    root = dist.get_global_rank(group, source)
    is_here = dist.get_rank(group) == source
    described = exchange.broadcast(_described(tree) if is_here else None, source, group)
    if is_here:
        for tensor, form in zip(trees.tensors(tree), described[1], strict=True):
            if form.num_elements:
                dist.broadcast(bytes_to_send(tensor, form), root, group)
        return trees.map_leaves(trees.detached, tree)
    found = _received(described, device, lambda part: dist.broadcast(part, root, group))
    return trees.map_leaves(trees.detached, found)


def send_tree(tree: Any, target: int, group: dist.ProcessGroup) -> None:
    """Send a tree to the rank `target` of the group, which calls `receive_tree`."""
    peer = dist.get_global_rank(group, target)
    described = _described(tree)
    exchange.send(described, target, group)
    for tensor, form in zip(trees.tensors(tree), described[1], strict=True):
        if form.num_elements:
            dist.send(bytes_to_send(tensor, form), peer, group)


def receive_tree(source: int, group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return the tree that the rank `source` of the group sends."""
    peer = dist.get_global_rank(group, source)
    described = exchange.receive(source, group)
    return _received(described, device, lambda part: dist.recv(part, peer, group))


def _described(tree: Any) -> Described:
    return ValueSpec.of(tree).description, tuple(map(TensorForm.of, trees.tensors(tree)))


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
