"""sl.export to a folder writes what from_pretrained and sl.load_pretrained read."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tests.checkpoint.pretrained_models import (
    EMBEDDING,
    TIED,
    assert_state,
    build,
    tensors,
    uninitialized,
)
from torch import nn
from torch.nn.functional import mse_loss

import stageline as sl
from stageline.checkpoint.pretrained import export_folder

INDEX = "model.safetensors.index.json"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def read(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}
        part = load_file(path)
        assert not found.keys() & part.keys()
        found |= part
    return found


@pytest.mark.parametrize("size", ["5GB", "300B", 1])
def test_every_tensor_is_stored_once(tmp_path: Path, size: str | int) -> None:
    pipe, folder = build(3), tmp_path / "new" / "folder"
    sl.export(folder, pipe, max_shard_size=size)
    state = tensors(pipe)
    found = read(folder)
    assert found.keys() == state.keys() - {TIED}
    assert all(torch.equal(found[name], state[name]) for name in found)
    for num_ranks in (1, 2):
        other = uninitialized(num_ranks)
        assert sl.load_pretrained(other, folder) == ((), ())
        assert_state(other, state)


def test_files_and_index_are_those_of_transformers(tmp_path: Path) -> None:
    sl.export(tmp_path, build(), max_shard_size="600B")
    index = json.loads((tmp_path / INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == [
        f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, 1 + len(files))
    ]
    assert names(tmp_path) == [*files, INDEX]
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in read(tmp_path).values())
    for name, file in index["weight_map"].items():
        assert name in load_file(tmp_path / file)
    sizes = [sum(t.nbytes for t in load_file(tmp_path / file).values()) for file in files]
    assert len(files) > 2
    assert max(sizes) <= 600


def test_other_files_are_kept_and_earlier_weights_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.1.partial" / "left").mkdir(parents=True)
    (tmp_path / "adapter.safetensors").write_text("mine")
    for seed, size in enumerate(["300B", "5GB", "600B", "600B", "5GB"]):
        pipe = build(seed=seed)
        sl.export(tmp_path, pipe, max_shard_size=size)
        other = build(seed=9)
        sl.load_pretrained(other, tmp_path)
        assert_state(other, tensors(pipe))
    assert names(tmp_path) == ["adapter.safetensors", "model.safetensors", "tokenizer.json"]


@pytest.mark.parametrize("before", ["300B", "5GB", None])
@pytest.mark.parametrize("after", ["300B", "5GB"])
def test_failed_export_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str | None, after: str
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    folder = tmp_path / "folder"
    if before:
        sl.export(folder, build(), max_shard_size=before)
    found = {path.name: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for place in ("export.write_shard", "pretrained.export_folder.write_config_files"):
        with monkeypatch.context() as patch:
            patch.setattr(f"stageline.checkpoint.{place}", full)
            with pytest.raises(sl.CheckpointError, match="No space left on device"):
                sl.export(folder, build(seed=1), max_shard_size=after)
        assert {p.name: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == found
        assert names(tmp_path) == (["folder"] if before else [])


@pytest.mark.parametrize("before", ["300B", "5GB"])
@pytest.mark.parametrize("after", ["300B", "5GB"])
def test_weights_of_two_exports_are_never_mixed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, after: str
) -> None:
    """Stop after each number of renames, as a crash does."""
    old, new = build(seed=1), build(seed=2)
    for count in range(20):
        folder = tmp_path / str(count)
        sl.export(folder, old, max_shard_size=before)
        with monkeypatch.context() as patch:
            crash_after(patch, count)
            try:
                sl.export(folder, new, max_shard_size=after)
            except KeyboardInterrupt:
                pass
            else:
                assert count > 0
                break
        other = build(seed=3)
        try:
            sl.load_pretrained(other, folder)
        except sl.CheckpointError:
            assert (before, after) == ("300B", "300B")  # the same names: none for a moment
        else:
            found = tensors(other)[EMBEDDING]
            whole = old if torch.equal(found, tensors(old)[EMBEDDING]) else new
            assert_state(other, tensors(whole))
    else:
        pytest.fail("it never ended")


def crash_after(patch: pytest.MonkeyPatch, count: int) -> None:
    works, calls = Path.replace, iter(range(100))

    def replace(path: Path, target: Path) -> Path:
        if next(calls) == count:
            raise KeyboardInterrupt
        return works(path, target)

    patch.setattr(Path, "replace", replace)


def test_wrong_sizes_are_refused(tmp_path: Path, pipe: sl.Pipeline) -> None:
    for size in ("5 apples", "", 0, -1, True, None, float("nan"), "0.5B"):
        with pytest.raises(sl.CheckpointError, match="max_shard_size is "):
            sl.export(tmp_path / "x", pipe, max_shard_size=size)  # type: ignore[arg-type]
    assert names(tmp_path) == []


class Config:
    """Behaves like a configuration of transformers."""

    def __init__(self) -> None:
        self.architectures: list[str] | None = None
        self.dtype: object = torch.bfloat16

    def to_json_string(self) -> str:
        return json.dumps({"architectures": self.architectures, "dtype": str(self.dtype)})


class Generation:
    """Writes a file of its own."""

    def save_pretrained(self, folder: Path) -> None:
        (folder / "generation_config.json").write_text("{}")


class Named(nn.Sequential):
    """A model whose head is the first in its state_dict, with a configuration."""

    def __init__(self) -> None:
        first, last = nn.Linear(4, 4), nn.Linear(4, 4)
        last.weight = first.weight
        super().__init__(first, last)
        self.config, self.generation_config = Config(), Generation()


def test_the_configuration_is_written_with_the_model_s_class_and_dtype(tmp_path: Path) -> None:
    model = Named()
    pipe = sl.Pipeline(model, mse_loss, num_ranks=2, num_microbatches=1, backend="serial")
    sl.export(tmp_path, pipe)
    assert names(tmp_path) == ["config.json", "generation_config.json", "model.safetensors"]
    written = json.loads((tmp_path / "config.json").read_text())
    assert written == {"architectures": ["Named"], "dtype": "float32"}
    assert (model.config.architectures, model.config.dtype) == (None, torch.bfloat16)
    assert read(tmp_path).keys() == {"0.weight", "0.bias", "1.bias"}
    model.config = {"hidden": 4}  # type: ignore[assignment]
    sl.export(tmp_path / "other", pipe)
    assert names(tmp_path / "other") == ["model.safetensors"]


def test_tensors_are_divided_in_their_order() -> None:
    made = [
        export_folder.ExportTensor(str(n), torch.empty(size, dtype=torch.uint8), "", True)
        for n, size in enumerate([3, 3, 9, 1, 0, 5, 6])
    ]
    files = export_folder.several_files(made, 6)
    assert [[*chain(*file.names_by_layer)] for file in files] == [
        ["0", "1"],
        ["2"],
        ["3", "4", "5"],
        ["6"],
    ]
    assert [file.num_bytes for file in files] == [6, 9, 6, 6]
