"""Send Python values between ranks over a process group: first the length, then the bytes.

If one rank cannot encode its value, all ranks that take part raise, so none waits forever.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from stageline.errors import ModelError, StagelineError
from stageline.runtime.backends.processes.messages.encoding import decode, encode

T = TypeVar("T")


def gather(own: T, group: dist.ProcessGroup) -> list[T]:
    """Return the values of all ranks of the group, by rank."""
    message, error = _encode(own)
    count = dist.get_world_size(group)
    lengths = [torch.empty(1, dtype=torch.int64) for _ in range(count)]
    dist.all_gather(lengths, torch.tensor([len(message)]), group)
    longest = max(int(length) for length in lengths)
    padded = torch.cat([message, message.new_zeros(longest - len(message))])
    found = [torch.empty_like(padded) for _ in range(count)]
    dist.all_gather(found, padded, group)
    if error is not None:
        raise error
    pairs = zip(found, lengths, strict=True)
    return [_decode(each[: int(length)], rank) for rank, (each, length) in enumerate(pairs)]


def broadcast(own: T | None, source: int, group: dist.ProcessGroup) -> T:
    """Return the value of the rank `source` of the group."""
    message, error = _encode(own if dist.get_rank(group) == source else None)
    root = dist.get_global_rank(group, source)
    length = torch.tensor([len(message)])
    dist.broadcast(length, root, group)
    if dist.get_rank(group) != source:
        message = torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(message, root, group)
    if error is not None:
        raise error
    found: T = _decode(message, source)
    return found


def send(own: Any, target: int, group: dist.ProcessGroup) -> None:
    """Send a value to the rank `target` of the group, which calls `receive`."""
    message, error = _encode(own)
    peer = dist.get_global_rank(group, target)
    dist.send(torch.tensor([len(message)]), peer, group)
    dist.send(message, peer, group)
    if error is not None:
        raise error


def receive(source: int, group: dist.ProcessGroup) -> Any:
    """Return the value that the rank `source` of the group sends."""
    peer = dist.get_global_rank(group, source)
    length = torch.empty(1, dtype=torch.int64)
    dist.recv(length, peer, group)
    message = torch.empty(int(length), dtype=torch.uint8)
    dist.recv(message, peer, group)
    return _decode(message, source)


def _encode(own: Any) -> tuple[Tensor, StagelineError | None]:
    """Return the message with a value, or with the error that prevents it from being encoded."""
    try:
        return bytes_to_tensor(encode((True, own))), None
    except StagelineError as error:
        return bytes_to_tensor(encode((False, str(error)))), error


def _decode(message: Tensor, rank: int) -> Any:
    is_value, found = decode_tensor(message)
    if not is_value:
        raise ModelError(f"rank {rank}: {found}")
    return found


def bytes_to_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def decode_tensor(message: Tensor) -> Any:
    """Return the value that the bytes of this tensor encode."""
    return decode(message.numpy().tobytes())
