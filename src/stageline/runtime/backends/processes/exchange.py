"""Send Python values between ranks over a process group: first the length, then the bytes.

If one rank cannot encode its value, all ranks that take part raise, so none waits forever. All of
it is in memory of Python's, never on a device. `describe` returns what is sent of a value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stageline.errors import ModelError, StagelineError
from stageline.runtime.backends.processes.messages.encoding import LENGTH, decode, encode

Describe = Callable[[Any], Any]


def as_it_is(value: Any) -> Any:
    return value


def gather(
    own: Any, group: dist.ProcessGroup, describe: Describe = as_it_is, what: str = ""
) -> list[Any]:
    """Return the values of all ranks of the group, by rank; `what` is the same on all of them.

    Ranks that exchange something else at this moment have made other calls: all of them raise.
    """
    message, error = _encode((what, own), lambda pair: (what, describe(pair[1])))
    lengths = [bytearray(LENGTH) for _ in range(dist.get_world_size(group))]
    dist.all_gather([*map(bytes_to_tensor, lengths)], bytes_to_tensor(_length(message)), group)
    longest = max(map(_number, lengths))
    padded = message.ljust(longest, b"\0")
    found = [bytearray(longest) for _ in lengths]
    dist.all_gather([*map(bytes_to_tensor, found)], bytes_to_tensor(padded), group)
    if error is not None:
        raise error
    pairs = zip(found, lengths, strict=True)
    values = [_decode(each[: _number(length)], rank) for rank, (each, length) in enumerate(pairs)]
    check_same_call([there for there, _ in values])
    return [value for _, value in values]


def check_same_call(found: Sequence[str]) -> None:
    """Raise unless all ranks exchange the same; `found` is what each of them does, by rank."""
    for rank, there in enumerate(found):
        if there != found[0]:
            raise ModelError(
                f"rank 0 shares {found[0]} while rank {rank} shares {there}: make the same calls "
                "on all ranks, in the same order, and none on one rank alone, such as sl.save "
                "under `if rank == 0`"
            )


def broadcast(
    own: Any, source: int, group: dist.ProcessGroup, describe: Describe = as_it_is
) -> Any:
    """Return the value of the rank `source` of the group."""
    is_here = dist.get_rank(group) == source
    message, error = _encode(own, describe) if is_here else _encode(None, as_it_is)
    root = dist.get_global_rank(group, source)
    length = _length(message)
    dist.broadcast(bytes_to_tensor(length), root, group)
    if not is_here:
        message = bytearray(_number(length))
    dist.broadcast(bytes_to_tensor(message), root, group)
    if error is not None:
        raise error
    return _decode(message, source)


def send(own: Any, target: int, group: dist.ProcessGroup, describe: Describe = as_it_is) -> None:
    """Send a value to the rank `target` of the group, which calls `receive`."""
    message, error = _encode(own, describe)
    peer = dist.get_global_rank(group, target)
    for part in (_length(message), message):
        dist.send(bytes_to_tensor(part), peer, group)
    if error is not None:
        raise error


def receive(source: int, group: dist.ProcessGroup) -> Any:
    """Return the value that the rank `source` of the group sends."""
    peer = dist.get_global_rank(group, source)
    length = bytearray(LENGTH)
    dist.recv(bytes_to_tensor(length), peer, group)
    message = bytearray(_number(length))
    dist.recv(bytes_to_tensor(message), peer, group)
    return _decode(message, source)


def bytes_to_tensor(data: bytearray) -> Tensor:
    """Return a tensor of bytes in the same memory."""
    return torch.frombuffer(data, dtype=torch.uint8)


def _encode(own: Any, describe: Describe) -> tuple[bytearray, StagelineError | None]:
    """Return the message with a value, or with the error that prevents it from being encoded."""
    try:
        return bytearray(encode((True, describe(own)))), None
    except StagelineError as error:
        return bytearray(encode((False, str(error)))), error


def _decode(message: bytearray, rank: int) -> Any:
    is_value, found = decode(message)
    if not is_value:
        raise ModelError(f"rank {rank}: {found}")
    return found


def _length(message: bytearray) -> bytearray:
    return bytearray(len(message).to_bytes(LENGTH, "little"))


def _number(length: bytearray) -> int:
    return int.from_bytes(length, "little")
