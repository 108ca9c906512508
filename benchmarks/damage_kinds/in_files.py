"""Damage to the files and folders of a checkpoint."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

from benchmarks.damage_kinds.in_bytes import a_file


def file_missing(rng: random.Random, checkpoint: Path) -> None:
    a_file(rng, checkpoint).unlink()


def file_empty(rng: random.Random, checkpoint: Path) -> None:
    a_file(rng, checkpoint).write_bytes(b"")


def file_is_a_folder(rng: random.Random, checkpoint: Path) -> None:
    path = a_file(rng, checkpoint)
    path.unlink()
    path.mkdir()


def file_is_a_link(rng: random.Random, checkpoint: Path) -> None:
    """Replace a file by a link to nothing, itself, a folder, a device, or the file."""
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
    """Combine two versions of a file, as an interrupted write does."""
    path = a_file(rng, checkpoint)
    old = (checkpoint.parent / "step-00000001" / path.name).read_bytes()
    new = path.read_bytes()
    where = rng.randrange(len(new))
    path.write_bytes(rng.choice([new[:where] + old[where:], old[:where] + new[where:]]))


def tensors_swapped(rng: random.Random, checkpoint: Path) -> None:
    """Swap two tensors of the same size without changing the headers."""
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
    """Replace a file by one of the checkpoint before."""
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
