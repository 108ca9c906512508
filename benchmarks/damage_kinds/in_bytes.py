"""Damage to the bytes of a file of a checkpoint."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from pathlib import Path

from stageline.checkpoint import record_file

Damage = Callable[[random.Random, Path], None]


def a_file(rng: random.Random, checkpoint: Path) -> Path:
    """Return a random file: the record as often as all others together."""
    shards = sorted(checkpoint.glob("*.safetensors"))
    return rng.choice([*shards, *[checkpoint / record_file.RECORD] * len(shards)])


def changing(change: Callable[[random.Random, bytearray], bytes | bytearray]) -> Damage:
    def damage(rng: random.Random, checkpoint: Path) -> None:
        path = a_file(rng, checkpoint)
        path.write_bytes(change(rng, bytearray(path.read_bytes())))

    damage.__name__ = change.__name__
    return damage


def one_bit_flipped(rng: random.Random, data: bytearray) -> bytearray:
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return data


def one_bit_flipped_in_the_first_bytes(rng: random.Random, data: bytearray) -> bytearray:
    data[rng.randrange(min(len(data), 100))] ^= 1 << rng.randrange(8)
    return data


def several_bits_flipped(rng: random.Random, data: bytearray) -> bytearray:
    for _ in range(rng.randrange(2, 50)):
        data = one_bit_flipped(rng, data)
    return data


def _block(rng: random.Random, data: bytearray) -> slice:
    length = rng.choice([1, 4, 16, 512, 4096])
    start = rng.randrange(len(data))
    return slice(start, min(start + length, len(data)))


def block_of_zeros(rng: random.Random, data: bytearray) -> bytearray:
    where = _block(rng, data)
    data[where] = bytes(where.stop - where.start)
    return data


def block_of_noise(rng: random.Random, data: bytearray) -> bytearray:
    where = _block(rng, data)
    data[where] = rng.randbytes(where.stop - where.start)
    return data


def block_twice(rng: random.Random, data: bytearray) -> bytearray:
    """Copy a block over another part of the file."""
    block = data[_block(rng, data)]
    start = rng.randrange(len(data) - len(block) + 1)
    data[start : start + len(block)] = block
    return data


def blocks_swapped(rng: random.Random, data: bytearray) -> bytearray:
    length = rng.choice([4, 64, 512])
    a, b = (rng.randrange(max(1, len(data) // length)) * length for _ in range(2))
    one, other = data[a : a + length], data[b : b + length]
    if len(one) == len(other):
        data[a : a + length], data[b : b + length] = other, one
    return data


def cut_short(rng: random.Random, data: bytearray) -> bytearray:
    return data[: rng.randrange(len(data))]


def beginning_lost(rng: random.Random, data: bytearray) -> bytearray:
    return data[rng.randrange(1, len(data)) :]


def bytes_lost(rng: random.Random, data: bytearray) -> bytearray:
    del data[_block(rng, data)]
    return data


def bytes_inserted(rng: random.Random, data: bytearray) -> bytearray:
    start = rng.randrange(len(data))
    data[start:start] = rng.randbytes(rng.choice([1, 8, 500]))
    return data


def garbage_appended(rng: random.Random, data: bytearray) -> bytearray:
    return data + rng.choice([b"\0", b"\n", b" ", b"}", rng.randbytes(1000), bytes(data)])


def as_text_of_another_system(rng: random.Random, data: bytearray) -> bytes:
    old, new = rng.choice([(b"\n", b"\r\n"), (b"\r\n", b"\n"), (b"\xff", b"\xef\xbf\xbd")])
    return bytes(data).replace(old, new)


def as_another_encoding(rng: random.Random, data: bytearray) -> bytes:
    text = bytes(data).decode("latin-1")
    return rng.choice([text.encode("utf-16"), b"\xef\xbb\xbf" + data, zlib.compress(data)])


def reversed_or_filled(rng: random.Random, data: bytearray) -> bytes:
    return rng.choice([bytes(data[::-1]), bytes(len(data)), b"\xff" * len(data)])


def length_in_the_first_bytes(rng: random.Random, data: bytearray) -> bytearray:
    size = rng.choice([0, 1, len(data), 2**31, 2**40, 2**63, 2**64 - 1, rng.randrange(2**64)])
    data[:8] = size.to_bytes(8, "little")
    return data


def bytes_rotated(rng: random.Random, data: bytearray) -> bytearray:
    where = rng.choice([1, 4, 8, 512, rng.randrange(len(data))])
    return data[where:] + data[:where]


def high_bits_lost(rng: random.Random, data: bytearray) -> bytes:
    """Clear the high bit of each byte, as a seven-bit connection does."""
    start = rng.randrange(len(data))
    return bytes(data[:start]) + bytes(byte & 0x7F for byte in data[start:])


CHANGES = (
    *(one_bit_flipped,) * 6,
    *(one_bit_flipped_in_the_first_bytes, several_bits_flipped, block_of_zeros, block_of_noise),
    *(block_twice, blocks_swapped, cut_short, beginning_lost, bytes_lost, bytes_inserted),
    *(garbage_appended, as_text_of_another_system, as_another_encoding, reversed_or_filled),
    *(length_in_the_first_bytes, bytes_rotated, high_bits_lost),
)
