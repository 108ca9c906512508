"""Sum gradients over the replicas on one machine, through shared memory.

    replica 0   writes g0 for replica 1     adds g1 to its own
    replica 1   writes g1 for replica 0     adds g0 to its own

An all-reduce over gloo sends every byte through sockets, by threads of its own that take processor
time from the backward. Here a gradient is copied once for each other replica, and added once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor, nn

from stageline.model.layers import Value
from stageline.runtime.backends.processes.groups import ProcessGroups
from stageline.runtime.backends.processes.messages.layout import MessageLayout
from stageline.runtime.backends.processes.messages.local_links import LocalLink
from stageline.runtime.backends.processes.messages.shapes import ValueSpec
from stageline.runtime.engine.minibatch import Message, MessageKey
from stageline.runtime.engine.replicas import local
from stageline.runtime.exactness.gradient_types import gradient_type
from stageline.schedules.action import Action, Kind

MOST_REPLICAS = 4  # each sends to each other: a ring, as gloo has, moves fewer bytes for more
# Bytes of a piece, and pieces that wait for other replicas. 76 MB of gradients take 10 MB more
# memory with these, and 30 with pieces of 4 MiB, which are 5 % faster; gloo's buffers take 80.
PIECE, IN_FLIGHT = 2**20, 2
GRADIENTS = Value(0, "gradients")
Gradients = Sequence[Tensor | None]
Part = tuple[nn.Parameter, slice]  # rows of a parameter; all of one without dimensions


class GradientPiece(NamedTuple):
    """Gradients that are sent together, under a number that all replicas have for them."""

    number: int
    parts: Sequence[Part]
    layout: MessageLayout

    @property
    def key(self) -> MessageKey:
        return self.number, Action(0, Kind.REDUCE_GRAD)


class SharedSums:
    """Sums over the replicas. State: the pieces that are not finished."""

    def __init__(self, links: Mapping[int, LocalLink], replica: int) -> None:
        self.links, self.replica = links, replica
        self.unsent: deque[GradientPiece] = deque()
        self.num_started = 0
        self.sent: dict[int, Gradients] = {}  # one's own, by the number of a piece under way
        self.layouts: dict[object, MessageLayout] = {}

    def start(self, bucket: Sequence[nn.Parameter]) -> Callable[[], None]:
        """Start to sum gradients; call the result to wait for those of the other replicas."""
        pieces = [self._piece(parts) for parts in pieces_of(bucket)]
        self.unsent += pieces
        self._send_some()

        def finish() -> None:
            for piece in pieces:
                self._finish(piece)

        return finish

    def _piece(self, parts: Sequence[Part]) -> GradientPiece:
        self.num_started += 1
        tensors = [_rows(parameter, rows) for parameter, rows in parts]
        types = [gradient_type(parameter) for parameter, _ in parts]
        form = tuple(
            (tensor.shape, tensor.stride(), dtype)
            for tensor, dtype in zip(tensors, types, strict=True)
        )
        if form not in self.layouts:
            pairs = zip(tensors, types, strict=True)
            shape = ValueSpec.of(
                [t if t.dtype == dtype else torch.empty_like(t, dtype=dtype) for t, dtype in pairs]
            )
            self.layouts[form] = MessageLayout(False, (GRADIENTS,), (shape,))
        return GradientPiece(self.num_started, parts, self.layouts[form])

    def _finish(self, piece: GradientPiece) -> None:
        while self.unsent and self.unsent[0].number <= piece.number:
            self._send(self.unsent.popleft())
        others = {replica: _take(link, piece) for replica, link in sorted(self.links.items())}
        before = [found for replica, found in others.items() if replica < self.replica]
        after = [found for replica, found in others.items() if replica > self.replica]
        own = self.sent.pop(piece.number)
        for n, part in enumerate(piece.parts):
            _add(part, own[n], [found[n] for found in before], [found[n] for found in after])
        del others, before, after  # their memory is free before more is written
        self._send_some()

    def _send_some(self) -> None:
        while self.unsent and len(self.sent) < IN_FLIGHT:
            self._send(self.unsent.popleft())

    def _send(self, piece: GradientPiece) -> None:
        own = [None if p.grad is None else _rows(p.grad, rows) for p, rows in piece.parts]
        self.sent[piece.number] = own
        for link in self.links.values():
            link.send(piece.key, piece.layout, Message({GRADIENTS: own}, 0.0))


def shared_sums(groups: ProcessGroups) -> SharedSums | None:
    """Return how replicas sum gradients in memory; None if they are not all here, or are many."""
    is_complete = len(groups.replica_links) == groups.num_replicas - 1
    if not is_complete or not 1 < groups.num_replicas <= MOST_REPLICAS:
        return None
    return SharedSums(groups.replica_links, groups.replica)


def pieces_of(bucket: Sequence[nn.Parameter]) -> Iterator[list[Part]]:
    """Yield the parameters in pieces of at most `PIECE` bytes, or of a single row."""
    piece: list[Part] = []
    room = PIECE
    for parameter in bucket:
        tensor = local(parameter)
        num_rows = len(tensor) if tensor.dim() else 1
        num_bytes = tensor.numel() * gradient_type(parameter).itemsize
        row_bytes = max(1, num_bytes // max(1, num_rows))
        first = 0
        while first < num_rows:
            count = min(num_rows - first, room // row_bytes)
            if count < 1 and piece:
                yield piece
                piece, room = [], PIECE
                continue
            count = max(1, count)
            piece.append((parameter, slice(first, first + count)))
            room -= count * row_bytes
            first += count
    if piece:
        yield piece


def _rows(tensor: Tensor, rows: slice) -> Tensor:
    part = local(tensor.detach())
    return part[rows] if part.dim() else part


def _take(link: LocalLink, piece: GradientPiece) -> list[Tensor | None]:
    found: list[Tensor | None] = link.take(piece.key, piece.layout).contents[GRADIENTS]
    return found


def _add(part: Part, own: Tensor | None, before: Gradients, after: Gradients) -> None:
    """Add other replicas' gradients in the order of the replicas, so that all have the same bits.

    A sum of two does not depend on their order, so one's own may be the second.
    """
    earlier = [gradient for gradient in before if gradient is not None]
    later = [gradient for gradient in after if gradient is not None]
    if own is not None:
        if earlier:
            own.add_(reduce(torch.add, earlier))
        for gradient in later:
            own.add_(gradient)
    elif earlier or later:
        parameter, rows = part
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter, dtype=gradient_type(parameter))
        _rows(parameter.grad, rows).copy_(reduce(torch.add, [*earlier, *later]))
