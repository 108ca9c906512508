"""Damage to the values in the record and headers of a checkpoint."""

from __future__ import annotations

import json
import os
import random
import zlib
from pathlib import Path
from typing import Any

from stageline.checkpoint import record_file


def seal(checkpoint: Path, fields: dict[str, Any]) -> None:
    (checkpoint / record_file.RECORD).write_bytes(record_file.record_text(fields))


def odd_value(rng: random.Random) -> Any:
    nested: Any = []
    for _ in range(rng.choice([3, 90, 900])):
        nested = rng.choice([[nested], {"x": nested}])
    odd: list[Any] = [None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, 10**400, 1e308, 0.5, -0.0]
    odd += [float("nan"), float("inf"), "x", "", "null", "1", "../x", "\0", "\ud800", "x" * 10**5]
    odd += [[], {}, [None], [1, 2], {"()": 3}, {"{}": [[[], 1]]}, {"{}": 1}, [[]] * 9, nested]
    return rng.choice(odd)


def with_odd_value(rng: random.Random, value: Any) -> Any:
    """Return a value with one item inside it replaced, removed, added or repeated."""
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
    """Change a value of the JSON file, with or without its first line."""
    path = checkpoint / record_file.RECORD
    text = path.read_text()
    changed = with_odd_value(rng, json.loads(text))
    again = json.dumps(changed, indent=rng.choice([None, 1]))
    path.write_text(rng.choice([again, text.split("\n")[0] + "\n" + again.removeprefix("{")]))


def value_in_a_header(rng: random.Random, checkpoint: Path) -> None:
    rewrite_header(rng, rng.choice(sorted(checkpoint.glob("*.safetensors"))))


def rewrite_header(rng: random.Random, path: Path) -> None:
    """Change a value of a header; keep its length field valid, and often its length."""
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
    """Declare a tensor of terabytes in a sparse file of that length."""
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
