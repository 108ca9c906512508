"""Ways in which a checkpoint on disk is damaged: its bytes, its files and folders, its values."""

from __future__ import annotations

import json
import os
import random
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stageline.checkpoint import record_file

Damage = Callable[[random.Random, Path], None]


def seal(checkpoint: Path, fields: dict[str, Any]) -> None:
    (checkpoint / record_file.RECORD).write_bytes(record_file.record_text(fields))


# Damage to the bytes of a file


def a_file(rng: random.Random, checkpoint: Path) -> Path:
    """Return a random one; the record, which is small, as often as the others together."""
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
    """Somewhere else too, over what was there."""
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
    """As a line of seven bits does."""
    start = rng.randrange(len(data))
    return bytes(data[:start]) + bytes(byte & 0x7F for byte in data[start:])


# Damage to files and folders


def file_missing(rng: random.Random, checkpoint: Path) -> None:
    a_file(rng, checkpoint).unlink()


def file_empty(rng: random.Random, checkpoint: Path) -> None:
    a_file(rng, checkpoint).write_bytes(b"")


def file_is_a_folder(rng: random.Random, checkpoint: Path) -> None:
    path = a_file(rng, checkpoint)
    path.unlink()
    path.mkdir()


def file_is_a_link(rng: random.Random, checkpoint: Path) -> None:
    """To nothing, itself, a folder, a device, or to the file, which is fine."""
    path = a_file(rng, checkpoint)
    kept = path.rename(checkpoint / "elsewhere")
    to = ["nothing", path.name, "..", "/dev/zero", "/dev/null", "/proc/self/mem", kept.name]
    path.symlink_to(rng.choice(to))


def file_is_a_pipe(rng: random.Random, checkpoint: Path) -> None:
    path = a_file(rng, checkpoint)
    path.unlink()
    os.mkfifo(path)


def file_with_a_terabyte_of_nothing(rng: random.Random, checkpoint: Path) -> None:
    os.truncate(a_file(rng, checkpoint), 2**40)


def file_renamed(rng: random.Random, checkpoint: Path) -> None:
    path = a_file(rng, checkpoint)
    path.rename(path.with_name(rng.choice([path.name.upper(), f"{path.name}.bak", "x"])))


def files_swapped(rng: random.Random, checkpoint: Path) -> None:
    one, other = rng.sample(sorted(checkpoint.iterdir()), 2)
    kept = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(kept)


def file_half_of_another_checkpoint(rng: random.Random, checkpoint: Path) -> None:
    """As a write that was torn leaves it: the first part is new, the rest is old."""
    path = a_file(rng, checkpoint)
    old = (checkpoint.parent / "step-00000001" / path.name).read_bytes()
    new = path.read_bytes()
    where = rng.randrange(len(new))
    path.write_bytes(rng.choice([new[:where] + old[where:], old[:where] + new[where:]]))


def tensors_swapped(rng: random.Random, checkpoint: Path) -> None:
    """Two of the same size, with all headers as they were."""
    path = rng.choice(sorted(checkpoint.glob("*.safetensors")))
    data = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    fields = json.loads(data[8:start])
    places = [fields[name]["data_offsets"] for name in fields if name != "__metadata__"]
    sizes = [stop - begin for begin, stop in places]
    size = rng.choice([size for size in sizes if sizes.count(size) > 1])
    one, other = rng.sample([begin for begin, stop in places if stop - begin == size], 2)
    a, b = slice(start + one, start + one + size), slice(start + other, start + other + size)
    data[a], data[b] = data[b], data[a]
    path.write_bytes(data)


def file_over_another(rng: random.Random, checkpoint: Path) -> None:
    one, other = rng.sample(sorted(checkpoint.iterdir()), 2)
    one.write_bytes(other.read_bytes())


def file_of_another_checkpoint(rng: random.Random, checkpoint: Path) -> None:
    """Of the same run, one step earlier."""
    path = a_file(rng, checkpoint)
    earlier = sorted((checkpoint.parent / "step-00000001").iterdir())
    path.write_bytes(rng.choice(earlier).read_bytes())


def files_added(rng: random.Random, checkpoint: Path) -> None:
    (checkpoint / "shard-00009.safetensors").write_bytes(rng.randbytes(99))
    (checkpoint / "more").mkdir()


def folder_renamed(rng: random.Random, checkpoint: Path) -> None:
    name = rng.choice(["step-00000009", "step-x", "step-00000002.partial", "step-2"])
    checkpoint.rename(checkpoint.with_name(name))


def folder_is_something_else(rng: random.Random, checkpoint: Path) -> None:
    kept = checkpoint.rename(checkpoint.with_name("kept"))
    kind = rng.randrange(4)
    if kind == 0:
        checkpoint.write_text("a file")
    elif kind == 1:
        checkpoint.symlink_to(checkpoint.name)
    elif kind == 2:
        checkpoint.symlink_to(kept.name)
    else:
        checkpoint.mkdir()


# Damage to values


def odd_value(rng: random.Random) -> Any:
    nested: Any = []
    for _ in range(rng.choice([3, 90, 900])):
        nested = rng.choice([[nested], {"x": nested}])
    odd: list[Any] = [None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, 10**400, 1e308, 0.5, -0.0]
    odd += [float("nan"), float("inf"), "x", "", "null", "1", "../x", "\0", "\ud800", "x" * 10**5]
    odd += [[], {}, [None], [1, 2], {"()": 3}, {"{}": [[[], 1]]}, {"{}": 1}, [[]] * 9, nested]
    return rng.choice(odd)


def with_odd_value(rng: random.Random, value: Any) -> Any:
    """Return it with one value, somewhere inside, that is replaced, removed, added or moved."""
    if isinstance(value, dict) and value and rng.random() < 0.95:
        key = rng.choice(list(value))
        kind = rng.random()
        if kind < 0.8:
            return value | {key: with_odd_value(rng, value[key])}
        if kind < 0.9:
            return {k: v for k, v in value.items() if k != key}
        return value | {rng.choice([f"{key}x", "x", "__proto__"]): value[key]}
    if isinstance(value, list) and value and rng.random() < 0.9:
        index = rng.randrange(len(value))
        kind = rng.random()
        if kind < 0.8:
            return [*value[:index], with_odd_value(rng, value[index]), *value[index + 1 :]]
        return value[:index] + value[index + 1 :] if kind < 0.9 else [*value, value[index]]
    if isinstance(value, int) and not isinstance(value, bool) and rng.random() < 0.5:
        return value + rng.choice([-1, 1, 4, 2**20, 2**40, 2**62])
    return odd_value(rng)


def value_in_the_record(rng: random.Random, checkpoint: Path) -> None:
    """As an editor would: it stays JSON, and keeps its first line or is written anew."""
    path = checkpoint / record_file.RECORD
    text = path.read_text()
    changed = with_odd_value(rng, json.loads(text))
    again = json.dumps(changed, indent=rng.choice([None, 1]))
    path.write_text(rng.choice([again, text.split("\n")[0] + "\n" + again.removeprefix("{")]))


def value_in_a_header(rng: random.Random, checkpoint: Path) -> None:
    rewrite_header(rng, rng.choice(sorted(checkpoint.glob("*.safetensors"))))


def rewrite_header(rng: random.Random, path: Path) -> None:
    """Change a value; the length in front, and often that of the file, are kept right."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    fields = json.loads(data[8 : 8 + length])
    if rng.random() < 0.4:
        own = with_odd_value(rng, json.loads(fields["__metadata__"]["stageline"]))
        fields["__metadata__"]["stageline"] = json.dumps(own)
    else:
        fields = with_odd_value(rng, fields)
    text = json.dumps(fields).encode()
    if rng.random() < 0.7:
        text = text[:length].ljust(length)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def forged_record(rng: random.Random, checkpoint: Path) -> None:
    fields = with_odd_value(rng, record_file.read_record(checkpoint))
    seal(checkpoint, fields if isinstance(fields, dict) else {"data": fields})


def forged_header(rng: random.Random, checkpoint: Path) -> None:
    record = record_file.read_record(checkpoint)
    file = rng.choice(record["files"])
    path = checkpoint / file["name"]
    rewrite_header(rng, path)
    forge(path, file)
    seal(checkpoint, record)


def forged_giant(rng: random.Random, checkpoint: Path) -> None:
    """A tensor of terabytes, in a file that is as long as that, but has holes."""
    record = record_file.read_record(checkpoint)
    file = rng.choice(record["files"])
    path = checkpoint / file["name"]
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    fields = json.loads(data[8 : 8 + length])
    names = [name for name in fields if name != "__metadata__"]
    last = max(names, key=lambda name: fields[name]["data_offsets"][1])
    start, _ = fields[last]["data_offsets"]
    size = rng.choice([2**34, 2**42, 2**50])
    fields[last] |= {"dtype": "U8", "shape": [size], "data_offsets": [start, start + size]}
    own = json.loads(fields["__metadata__"]["stageline"])
    own[last] |= {"offset": [0], "whole": [size]}
    fields["__metadata__"]["stageline"] = json.dumps(own)
    text = json.dumps(fields).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    try:
        os.truncate(path, 8 + len(text) + start + size)
    except OSError:  # longer than files can be here
        return
    forge(path, file)
    seal(checkpoint, record)


def forge(path: Path, file: dict[str, Any]) -> None:
    with path.open("rb") as opened:
        length = 8 + int.from_bytes(opened.read(8), "little")
        opened.seek(0)
        header = opened.read(length)
    file |= {
        "num_bytes": path.stat().st_size,
        "header_bytes": length,
        "crc32": zlib.crc32(header),
    }


CHANGES = (
    *(one_bit_flipped,) * 6,
    *(one_bit_flipped_in_the_first_bytes, several_bits_flipped, block_of_zeros, block_of_noise),
    *(block_twice, blocks_swapped, cut_short, beginning_lost, bytes_lost, bytes_inserted),
    *(garbage_appended, as_text_of_another_system, as_another_encoding, reversed_or_filled),
    *(length_in_the_first_bytes, bytes_rotated, high_bits_lost),
)
KINDS: list[Damage] = [
    *(changing(change) for change in CHANGES),
    *[file_missing, file_empty, file_is_a_folder, file_is_a_link, file_is_a_pipe],
    *[file_with_a_terabyte_of_nothing, file_renamed, files_swapped, file_over_another],
    *[file_of_another_checkpoint, file_half_of_another_checkpoint, tensors_swapped, files_added],
    *[folder_renamed, folder_is_something_else],
    *[value_in_the_record] * 4,
    *[value_in_a_header] * 4,
    *[forged_record] * 4,
    *[forged_header] * 4,
    forged_giant,
]
