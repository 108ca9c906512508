"""Damaged files and indexes are refused by sl.load_pretrained, and change nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoint.pretrained_models import (
    EMBEDDING,
    TIED,
    assert_state,
    build,
    tensors,
    write_index,
    write_shards,
)
from torch import Tensor

import stageline as sl

INDEX = "model.safetensors.index.json"
SECOND = "model-00002-of-00002.safetensors"


def trained() -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors(build(seed=5)).items() if name != TIED}


def size(folder: Path) -> int:
    return (folder / SECOND).stat().st_size


def append(path: Path, data: bytes) -> None:
    path.write_bytes(path.read_bytes() + data)


def header(folder: Path, change: Callable[[bytes], bytes]) -> None:
    """Change the header of the second file; its length follows."""
    data = (folder / SECOND).read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    text = change(data[8:end])
    assert text != data[8:end]
    (folder / SECOND).write_bytes(len(text).to_bytes(8, "little") + text + data[end:])


def doubled(text: bytes) -> bytes:
    entry = b'{"model.layers.0.weight":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},'
    return entry + text.strip()[1:]


def moved(folder: Path) -> None:
    """Let the index name the other file for each tensor."""
    places = json.loads((folder / INDEX).read_text())["weight_map"]
    other = {SECOND: "model-00001-of-00002.safetensors"}
    write_index(folder, {name: other.get(file, SECOND) for name, file in places.items()})


def with_pipe(folder: Path) -> None:
    (folder / SECOND).unlink()
    os.mkfifo(folder / SECOND)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: os.truncate(f / SECOND, 7), "its 7 bytes are no safetensors file"),
        (lambda f: os.truncate(f / SECOND, 90), "are no safetensors file, or not all of one"),
        (lambda f: os.truncate(f / SECOND, size(f) - 1), "its tensors end at byte"),
        (lambda f: append(f / SECOND, b"x"), "its tensors end at byte"),
        (lambda f: (f / SECOND).write_bytes(b"\x80\x02}q\x00." * 9), "are no safetensors file"),
        (lambda f: (f / SECOND).unlink(), "No such file"),
        (with_pipe, "is not a regular file"),
        (lambda f: header(f, lambda text: text[:-9] + b"?" * 9), "Expecting|delimiter|Extra"),
        (lambda f: header(f, lambda text: text[:-1] + b"\xff"), "codec|utf"),
        (lambda f: header(f, doubled), "its header has model.layers.0.weight twice"),
        (lambda f: header(f, lambda t: t.replace(b'"I64"', b'"I65"')), "unknown dtype 'I65'"),
        (lambda f: header(f, lambda t: t.replace(b"[8,8]", b"[8,9]")), "cannot be at bytes"),
        (lambda f: header(f, lambda t: t.replace(b"[8,8]", b"[-8]")), "has no tensor at"),
        (lambda f: (f / INDEX).write_text("{"), "is not JSON"),
        (lambda f: (f / INDEX).write_text("[]"), "has no weight_map"),
        (lambda f: write_index(f, {}), "has no weight_map"),
        (lambda f: write_index(f, {EMBEDDING: "none.safetensors"}), "No such file"),
        (lambda f: write_index(f, {EMBEDDING: "../a.safetensors"}), "is no file of its folder"),
        (lambda f: write_index(f, {EMBEDDING: "a\\..\\..\\b"}), "is no file of its folder"),
        (lambda f: write_index(f, {EMBEDDING: "/etc/passwd"}), "is no file of its folder"),
        (lambda f: write_index(f, {EMBEDDING: "C:\\a.safetensors"}), "is no file of its folder"),
        (lambda f: write_index(f, {EMBEDDING: 3}), "it names 3, which is no file"),
        (lambda f: write_index(f, {EMBEDDING: ""}), "it names '', which is no file"),
        (lambda f: write_index(f, {EMBEDDING: "."}), "not a regular file"),
        (moved, "the index says that model.embed.weight is in it, but it is not"),
    ],
)
def test_damaged_files_change_nothing(
    tmp_path: Path, damage: Callable[[Path], Any], message: str
) -> None:
    folder = write_shards(tmp_path / "files", trained(), 2)
    pipe = build()
    before = tensors(pipe)
    damage(folder)
    with pytest.raises(sl.CheckpointError, match=message):
        sl.load_pretrained(pipe, folder)
    assert_state(pipe, before)
