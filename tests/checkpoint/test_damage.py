"""A damaged checkpoint loads exactly what was saved, or is refused and changes nothing.

benchmarks/damaged_checkpoints.py has many more kinds of damage, and 10,000 cases.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.checkpoint.pipelines import (
    assert_same,
    everything,
    pipeline,
    train,
)
from torch.optim import AdamW, Optimizer

import stageline as sl
from stageline.checkpoint import read_tensors, record_file

RECORD = "checkpoint.json"


class Saved:
    """A checkpoint, and a pipeline in another state that it is loaded into."""

    def __init__(self, folder: Path) -> None:
        pipe, optimizer = self.made()
        train(pipe, optimizer, range(2))
        sl.save(folder, pipe, optimizer, step=2, data={"seen": (18, None), 3: [1]})
        self.path = folder / "step-00000002"
        self.right = everything(pipe, optimizer)
        self.files = {path.name: path.read_bytes() for path in self.path.iterdir()}
        self.pipe, self.optimizer = self.made(init=5)
        train(self.pipe, self.optimizer, range(3))
        self.before = everything(self.pipe, self.optimizer)

    @staticmethod
    def made(init: int = 0) -> tuple[sl.Pipeline, Optimizer]:
        pipe = pipeline(init=init)
        return pipe, AdamW(pipe.parameters(), 1e-2)

    def put_back(self) -> None:
        shutil.rmtree(self.path)
        self.path.mkdir()
        for name, data in self.files.items():
            (self.path / name).write_bytes(data)

    def assert_refused(self, message: str | None = None) -> None:
        torch.set_rng_state(self.before["random"])
        with pytest.raises(sl.CheckpointError, match=message):
            sl.load(self.path, self.pipe, self.optimizer)
        assert_same(everything(self.pipe, self.optimizer), self.before)

    def record(self, change: Callable[[dict[str, Any]], Any]) -> None:
        """Change the record, and make its checksum fit."""
        fields = record_file.read_record(self.path)
        change(fields)
        (self.path / RECORD).write_bytes(record_file.record_text(fields))

    def header(self, change: Callable[[dict[str, Any], dict[str, Any]], Any]) -> None:
        """Change a header and what we add to it, and make its checksum fit."""
        path = self.path / "shard-00001.safetensors"
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        fields = json.loads(data[8 : 8 + length])
        own = json.loads(fields["__metadata__"]["stageline"])
        change(fields, own)
        fields["__metadata__"]["stageline"] = json.dumps(own)
        text = json.dumps(fields).encode()
        header = len(text).to_bytes(8, "little") + text
        path.write_bytes(header + data[8 + length :])
        seen = {"num_bytes": path.stat().st_size, "header_bytes": len(header)}
        seen["crc32"] = zlib.crc32(header)
        self.record(lambda record: record["files"][0].update(seen))


@pytest.fixture(scope="module")
def shared_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    torch.set_num_threads(1)
    return Saved(tmp_path_factory.mktemp("saved"))


@pytest.fixture
def saved(shared_checkpoint: Saved) -> Iterator[Saved]:
    yield shared_checkpoint
    shared_checkpoint.put_back()


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_any_flipped_bit_is_detected(shared_checkpoint: Saved, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(shared_checkpoint.files)))
    damaged = bytearray(shared_checkpoint.files[name])
    damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    (shared_checkpoint.path / name).write_bytes(damaged)
    shared_checkpoint.assert_refused()
    shared_checkpoint.put_back()


def test_flipped_bit_in_each_tensor_is_detected(saved: Saved) -> None:
    name = "shard-00001.safetensors"
    length = 8 + int.from_bytes(saved.files[name][:8], "little")
    header = json.loads(saved.files[name][8:length])
    for tensor, fields in header.items():
        if tensor != "__metadata__":
            start, stop = fields["data_offsets"]
            damaged = bytearray(saved.files[name])
            damaged[length + (start + stop - 1) // 2] ^= 16
            (saved.path / name).write_bytes(damaged)
            saved.assert_refused("the checksum of bytes .* does not match")


def test_load_is_bit_identical(saved: Saved) -> None:
    pipe, optimizer = Saved.made(init=5)
    train(pipe, optimizer, range(3))
    assert sl.load(saved.path, pipe, optimizer) == (2, {"seen": (18, None), 3: [1]})
    assert_same(everything(pipe, optimizer), saved.right)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r["groups"][0].update(values=None), r"its field groups.0.values is invalid"),
        (lambda r: r["groups"][0]["values"].update(lr="x"), "has 'x' for the optimizer's lr"),
        (lambda r: r["groups"][0]["values"].update(lr=10**400), "has int 1000.*… for the opt"),
        (
            lambda r: r["groups"][0]["values"].update(fused=2),
            "has 2 for the optimizer's fused, .* True, False or None",
        ),
        (lambda r: r["groups"][0]["values"].update(lr=None), "has None for the optimizer's lr"),
        (lambda r: r["groups"][0]["values"].update(lr=float("nan")), "has nan for the optimizer's"),
        (lambda r: r["groups"][0]["values"].update(betas={"()": [0.9]}), "for the optimizer's bet"),
        (lambda r: r["groups"][0]["values"].update(betas={"()": [0.9, 7]}), "has 7 .* from 0.0 to"),
        (lambda r: r["groups"][0]["values"].update(amsgrad=0.5), "has 0.5 for .*amsgrad"),
        (lambda r: r["groups"][0].update(names=[]), "lacks 0.weight"),
        (lambda r: r["groups"].append(r["groups"][0]), "a parameter in several groups"),
        (lambda r: r.update(num_steps=None), "its field num_steps is invalid"),
        (lambda r: r.update(num_steps=True), "its field num_steps is invalid"),
        (lambda r: r.update(num_steps=-1), "its field num_steps is invalid"),
        (lambda r: r.update(seed=2**64), "its field seed is invalid"),
        (lambda r: r.update(step="2"), "its field step is invalid"),
        (lambda r: r.update(values={"0.weight": {"step": []}}), "its field values.0.weight.step"),
        (
            lambda r: r.update(values={"x": {"step": 1}}),
            "the state of a parameter that is in no group",
        ),
        (lambda r: r.update(data={"{}": [1]}), "is damaged"),
        (lambda r: r.update(extra=1), "its field extra is invalid"),
        (
            lambda r: r["files"][0].update(name="../x.safetensors"),
            "its field files.0.name is invalid",
        ),
        (lambda r: r["files"][0].update(header_bytes=2**40), "is damaged"),
        (lambda r: r["files"].append(r["files"][0]), "do not make up a tensor"),
        (lambda r: r["files"].clear(), "lacks 0.weight"),
    ],
)
def test_invalid_record_with_a_valid_checksum_is_refused(
    saved: Saved, change: Callable[[dict[str, Any]], Any], message: str
) -> None:
    saved.record(change)
    saved.assert_refused(message)


MOMENT = "optimizer.1.0.weight.exp_avg"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h, _: h[MOMENT].update(shape=[2**40]), "cannot be at bytes"),
        (lambda h, _: h[MOMENT].update(shape=[8, -8]), "header has no tensor at"),
        (lambda h, _: h[MOMENT].update(shape=[8, 8.0]), "header has no tensor at"),
        (lambda h, _: h[MOMENT].update(data_offsets=[0, 2**62]), "cannot be at bytes"),
        (lambda h, _: h[MOMENT].update(data_offsets=[4, 260]), "cannot be at bytes"),
        (lambda h, _: h[MOMENT].update(dtype="F64"), "cannot be at bytes"),
        (lambda h, _: h[MOMENT].update(dtype="x"), "unknown dtype 'x'"),
        (lambda h, _: h.pop(MOMENT), "not have a checksum for each tensor"),
        (lambda _, own: own.pop(MOMENT), "not have a checksum for each tensor"),
        (lambda _, own: own[MOMENT].update(whole=[2**40, 8]), "do not make up a tensor"),
        (lambda _, own: own[MOMENT].update(offset=[1, 0]), "cannot be at .1, 0. of"),
        (lambda _, own: own[MOMENT].update(offset=[0]), "cannot be at .0,. of"),
        (lambda _, own: own[MOMENT].update(crc32=7), "the checksum of bytes .* does not match"),
        (lambda h, _: h["random.cpu"].update(dtype="I8"), "has int8 .* for random.cpu"),
    ],
)
def test_invalid_header_with_a_valid_checksum_is_refused(
    saved: Saved, change: Callable[[dict[str, Any], dict[str, Any]], Any], message: str
) -> None:
    saved.header(change)
    saved.assert_refused(message)


def test_huge_optimizer_state_is_refused_without_allocating_it(saved: Saved) -> None:
    """The file is as long as that, but full of holes, and its checksums fit."""
    size = 2**40
    path = saved.path / "shard-00001.safetensors"

    def giant(header: dict[str, Any], own: dict[str, Any]) -> None:
        end = max(header[name]["data_offsets"][1] for name in own)
        name = "optimizer.1.0.weight.max_exp_avg_sq"
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [end, end + size]}
        own[name] = {"crc32": 0, "offset": [0], "whole": [size]}

    saved.header(giant)
    saved.assert_refused("its tensors end at byte")
    os.truncate(path, path.stat().st_size + size)
    saved.record(lambda record: record["files"][0].update(num_bytes=path.stat().st_size))
    saved.assert_refused(
        r"has uint8 \(1099511627776,\) for optimizer.1.0.weight.max_exp_avg_sq, but"
    )


def test_invalid_random_state_is_refused(saved: Saved) -> None:
    path = saved.path / "shard-00001.safetensors"
    data = bytearray(path.read_bytes())
    length = 8 + int.from_bytes(data[:8], "little")
    start, stop = json.loads(data[8:length])["random.cpu"]["data_offsets"]
    garbage = b"\xff" * (stop - start)
    data[length + start : length + stop] = garbage
    path.write_bytes(data)
    crc32 = zlib.crc32(garbage)
    saved.header(lambda _, own: own["random.cpu"].update(crc32=crc32))
    saved.assert_refused("random.cpu is not the state of a generator")


def test_other_format_versions_are_refused(saved: Saved) -> None:
    (saved.path / RECORD).write_text('{\n "stageline_checkpoint": 1,\n "number": 1\n}')
    saved.assert_refused("it has format 1, but this version of Stageline reads format 2")
    text = saved.files[RECORD].replace(b'checkpoint": 2', b'checkpoint": 3')
    (saved.path / RECORD).write_bytes(text)
    saved.assert_refused("it has format 3, but")


@pytest.mark.parametrize("kind", ["folder", "pipe", "device", "loop", "nothing"])
@pytest.mark.parametrize("name", [RECORD, "shard-00001.safetensors"])
def test_folders_pipes_devices_and_dangling_links_are_refused(
    saved: Saved, name: str, kind: str
) -> None:
    path = saved.path / name
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind != "nothing":
        path.symlink_to("/dev/zero" if kind == "device" else path.name)
    saved.assert_refused()


def test_link_to_a_complete_file_is_accepted(saved: Saved) -> None:
    path = saved.path / "shard-00001.safetensors"
    path.symlink_to(path.rename(saved.path / "elsewhere").name)
    pipe, optimizer = Saved.made(init=5)
    sl.load(saved.path, pipe, optimizer)
    assert_same(everything(pipe, optimizer), saved.right)


def failing(monkeypatch: pytest.MonkeyPatch, name: str, call: int) -> None:
    """Let a function of `read_tensors` fail the n-th time, as a disk does."""
    works, calls = getattr(read_tensors, name), iter(range(10**6))

    def read(stored: Any) -> Any:
        if next(calls) == call:
            raise OSError(5, "Input/output error")
        return works(stored)

    monkeypatch.setattr(read_tensors, name, read)


@pytest.mark.parametrize("held", [0, 1000, 2**28])
def test_disk_error_while_verifying_changes_nothing(
    saved: Saved, monkeypatch: pytest.MonkeyPatch, held: int
) -> None:
    monkeypatch.setattr(read_tensors, "MAX_CACHED", held)
    for call in (0, 1, 30, 71):
        with monkeypatch.context() as patch:
            failing(patch, "_read" if held == 2**28 else "checksum", call if held != 1000 else 0)
            saved.assert_refused("Input/output error; nothing was changed")


@pytest.mark.parametrize("held", [0, 1000])
def test_tensors_beyond_the_cache_are_read_twice(
    saved: Saved, monkeypatch: pytest.MonkeyPatch, held: int
) -> None:
    monkeypatch.setattr(read_tensors, "MAX_CACHED", held)
    pipe, optimizer = Saved.made(init=5)
    with monkeypatch.context() as patch:
        failing(patch, "_read", 20)
        with pytest.raises(sl.CheckpointError, match="some old and some new values: load again"):
            sl.load(saved.path, pipe, optimizer)
    sl.load(saved.path, pipe, optimizer)
    assert_same(everything(pipe, optimizer), saved.right)


def test_checkpoint_deleted_during_load_changes_nothing_or_everything(
    saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `keep` of a training that goes on does to an evaluation."""
    for name, is_applied in (("stored_tensors", False), ("TensorReader", False), ("_apply", True)):
        module = "stageline.checkpoint.load"
        with monkeypatch.context() as patch:
            works = getattr(sl.checkpoint.load, name)

            def vanish(*args: Any, works: Any = works) -> Any:
                shutil.rmtree(saved.path)
                return works(*args)

            patch.setattr(f"{module}.{name}", vanish)
            if is_applied:
                sl.load(saved.path, *(made := Saved.made(init=5)))
                assert_same(everything(*made), saved.right)
            else:
                saved.assert_refused("No such file")
        saved.path.mkdir()
        saved.put_back()
