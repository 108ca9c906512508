"""Values from one rank to others over a process group: their length, then their bytes.

What one rank cannot send is refused on all of them that take part: none waits in vain.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from stageline.errors import ModelError, StagelineError
from stageline.runtime.backends.processes.encoding import decode, encode

T = TypeVar("T")


def gathered(own: T, group: dist.ProcessGroup) -> list[T]:
    """Return what each rank of the group has, by rank."""
    message, refusal = _message(own)
    count = dist.get_world_size(group)
    lengths = [torch.empty(1, dtype=torch.int64) for _ in range(count)]
    dist.all_gather(lengths, torch.tensor([len(message)]), group)
    longest = max(int(length) for length in lengths)
    padded = torch.cat([message, message.new_zeros(longest - len(message))])
    found = [torch.empty_like(padded) for _ in range(count)]
    dist.all_gather(found, padded, group)
    if refusal is not None:
        raise refusal
    pairs = zip(found, lengths, strict=True)
    return [_opened(each[: int(length)], rank) for rank, (each, length) in enumerate(pairs)]


def broadcast(own: T | None, source: int, group: dist.ProcessGroup) -> T:
    """Return what the rank `source` of the group has."""
    message, refusal = _message(own if dist.get_rank(group) == source else None)
    root = dist.get_global_rank(group, source)
    length = torch.tensor([len(message)])
    dist.broadcast(length, root, group)
    if dist.get_rank(group) != source:
        message = torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(message, root, group)
    if refusal is not None:
        raise refusal
    found: T = _opened(message, source)
    return found


def send(own: Any, target: int, group: dist.ProcessGroup) -> None:
    """To the rank `target` of the group, which receives."""
    message, refusal = _message(own)
    peer = dist.get_global_rank(group, target)
    dist.send(torch.tensor([len(message)]), peer, group)
    dist.send(message, peer, group)
    if refusal is not None:
        raise refusal


def receive(source: int, group: dist.ProcessGroup) -> Any:
    peer = dist.get_global_rank(group, source)
    length = torch.empty(1, dtype=torch.int64)
    dist.recv(length, peer, group)
    message = torch.empty(int(length), dtype=torch.uint8)
    dist.recv(message, peer, group)
    return _opened(message, source)


def _message(own: Any) -> tuple[Tensor, StagelineError | None]:
    """Of a value, or of why it cannot be sent."""
    try:
        return as_tensor(encode((True, own))), None
    except StagelineError as error:
        return as_tensor(encode((False, str(error)))), error


def _opened(message: Tensor, rank: int) -> Any:
    is_value, found = from_tensor(message)
    if not is_value:
        raise ModelError(f"rank {rank}: {found}")
    return found


def as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def from_tensor(message: Tensor) -> Any:
    """The value that these bytes are of."""
    return decode(message.numpy().tobytes())
