"""sl.export writes one safetensors file for the plain model, or leaves the one that was there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.checkpoint.pipelines import (
    assert_same,
    model,
    pipeline,
    train,
)
from torch import nn
from torch.optim import AdamW

import stageline as sl
from stageline.checkpoint import read_tensors, write_tensors


def test_exported_file_loads_into_the_plain_model(tmp_path: Path) -> None:
    pipe = pipeline()
    train(pipe, AdamW(pipe.parameters(), 1e-2), range(2))
    path = tmp_path / "model.safetensors"
    sl.export(path, pipe)
    sl.export(path, pipe)  # in place of the one that is there
    plain = model()
    plain.load_state_dict(load_file(path))
    assert_state_equal(plain, pipe)
    assert [found.name for found in tmp_path.iterdir()] == ["model.safetensors"]


def test_files_of_several_ranks_are_joined(tmp_path: Path) -> None:
    pipe = pipeline()
    state = pipe.state_dict() | {"flag": torch.tensor(True), "none": torch.empty(0, 2)}
    (tmp_path / "parts").mkdir()
    names = list(state)
    files = []
    for number, part in enumerate((names[::3], names[1::3], names[2::3]), start=1):
        pieces = write_tensors.local_pieces({name: state[name] for name in part})
        path = tmp_path / "parts" / f"shard-{number:05d}.safetensors"
        files.append(write_tensors.ShardFile(**write_tensors.write_shard(path, pieces)))
    found = read_tensors.stored_tensors(tmp_path / "parts", files)
    read_tensors.join_shards(found, [names[::2], names[1::2]], tmp_path / "whole")
    assert_same(load_file(tmp_path / "whole"), state)


def test_failed_export_keeps_the_existing_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    pipe, path = pipeline(), tmp_path / "model.safetensors"
    sl.export(path, pipe)
    before = path.read_bytes()
    monkeypatch.setattr("stageline.checkpoint.export.write_shard", full)
    with pytest.raises(sl.CheckpointError, match="No space left on device"):
        sl.export(path, pipe)
    assert path.read_bytes() == before
    assert [found.name for found in tmp_path.iterdir()] == ["model.safetensors"]


def assert_state_equal(plain: nn.Module, pipe: sl.Pipeline) -> None:
    assert plain.state_dict().keys() == pipe.state_dict().keys()
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, pipe.state_dict()[name])


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_export_keeps_unrelated_files(tmp_path: Path, pipe: sl.Pipeline) -> None:
    path = tmp_path / "model.safetensors"
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "mine.txt").write_text("mine")
    (tmp_path / "model.safetensors.partial").symlink_to(kept)
    (tmp_path / "model.safetensors.1.partial").write_text("a file")
    (tmp_path / "model.safetensors.2.partial" / "left").mkdir(parents=True)
    sl.export(path, pipe)
    assert load_file(path).keys() == pipe.state_dict().keys()
    assert names(kept) == ["mine.txt"]
    assert names(tmp_path) == [
        *("kept", "model.safetensors", "model.safetensors.1.partial", "model.safetensors.partial")
    ]
