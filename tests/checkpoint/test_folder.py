"""Checkpoints in a folder with other files, other writers, crashes and missing permissions."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from threading import Barrier, Thread
from typing import Any

import pytest
import torch
from tests.checkpoint.pipelines import (
    pipeline,
)

import stageline as sl
from stageline.checkpoint import folder as folders


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_latest_checkpoints_are_kept_and_leftovers_deleted(tmp_path: Path) -> None:
    pipe = pipeline()
    (tmp_path / "step-00000007.partial").mkdir()
    (tmp_path / "step-00000007.partial" / "shard.safetensors").write_text("half")
    (tmp_path / "notes.txt").write_text("mine")
    assert sl.latest(tmp_path) is None
    for step in (1, 2, 3):
        sl.save(tmp_path, pipe, step=step)
    sl.save(tmp_path, pipe, step=3)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["notes.txt", "step-00000002", "step-00000003"]
    sl.save(tmp_path, pipe, step=4, keep=1)
    assert sl.latest(tmp_path) == tmp_path / "step-00000004"
    assert len(list(tmp_path.iterdir())) == 2
    sl.save(tmp_path, pipe, step=5, keep=9)
    assert len(list(tmp_path.iterdir())) == 3


def test_latest_is_the_last_saved_even_with_a_smaller_step(saved: Path) -> None:
    pipe = pipeline()
    sl.save(saved, pipe, step=9)
    sl.load(saved / "step-00000002", pipe)
    sl.save(saved, pipe, step=4)
    assert sorted(path.name for path in saved.iterdir()) == ["step-00000004", "step-00000009"]
    assert sl.load(saved, pipe).step == 4


@pytest.mark.parametrize("step", ["_write_file", "_sync_folder", "_delete_checkpoint"])
def test_disk_error_while_publishing_leaves_only_complete_checkpoints(
    saved: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    pipe = pipeline()
    monkeypatch.setattr(folders, step, fail)
    with pytest.raises(sl.CheckpointError, match="Input/output error"):
        sl.save(saved, pipe, step=3, keep=1)
    for path in saved.iterdir():
        assert sl.load(path, pipe).step == int(path.name[5:])


def test_save_keeps_unrelated_files(tmp_path: Path, pipe: sl.Pipeline) -> None:
    """Files, links and folders with such names are neither followed nor deleted."""
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "mine.txt").write_text("mine")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "step-00000001.partial").write_text("a file")
    (folder / "step-00000002.partial").symlink_to(kept)
    (folder / "step-00000002.1.partial").symlink_to("nothing")
    (folder / "step-x").mkdir()
    (folder / "step-x.partial").mkdir()
    (folder / "step-best").mkdir()
    (folder / "step-00000009.txt").write_text("notes")
    strays = names(folder)
    for step in (1, 2, 3, 3):
        sl.save(folder, pipe, step=step)
    assert names(folder) == sorted([*strays, "step-00000002", "step-00000003"])
    assert (kept / "mine.txt").read_text() == "mine"
    assert (folder / "step-00000001.partial").read_text() == "a file"
    assert sl.load(folder, pipe).step == 3


def test_copy_with_another_name_is_never_deleted(tmp_path: Path, pipe: sl.Pipeline) -> None:
    sl.save(tmp_path, pipe, step=1)
    shutil.copytree(tmp_path / "step-00000001", tmp_path / "step-best")
    for step in (2, 3, 4):
        sl.save(tmp_path, pipe, step=step, keep=1)
    assert names(tmp_path) == ["step-00000004", "step-best"]
    assert sl.load(tmp_path / "step-best", pipe).step == 1


def test_linked_checkpoint_is_read_and_only_the_link_is_deleted(
    tmp_path: Path, pipe: sl.Pipeline
) -> None:
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    for step in (1, 2):
        sl.save(folder, pipe, step=step)
        final = folder / f"step-{step:08d}"
        final.symlink_to(final.rename(elsewhere.with_name(f"{step}")))
    assert sl.load(folder, pipe).step == 2
    sl.save(folder, pipe, step=2)  # in place of a link
    sl.save(folder, pipe, step=3, keep=1)
    assert names(folder) == ["step-00000003"]
    assert sl.load(tmp_path / "1", pipe).step == 1
    assert sl.load(tmp_path / "2", pipe).step == 2


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_name_in_use_is_refused_before_anything_is_written(
    tmp_path: Path, pipe: sl.Pipeline, kind: str
) -> None:
    taken = tmp_path / "step-00000001"
    if kind == "file":
        taken.write_text("mine")
    elif kind == "folder":
        taken.mkdir()
        (taken / "mine.txt").write_text("mine")
    else:
        taken.symlink_to("nothing")
    with pytest.raises(
        sl.CheckpointError, match=r"exists and is not a checkpoint: move it elsewhere"
    ):
        sl.save(tmp_path, pipe, step=1)
    assert names(tmp_path) == ["step-00000001"]


def test_leftover_that_cannot_be_deleted_causes_a_warning(
    tmp_path: Path, pipe: sl.Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "step-00000001.partial" / "inside").mkdir(parents=True)

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(folders, "_delete_tree", refuse)
        with pytest.warns(UserWarning, match=r"step-00000001.partial' was left .* it yourself"):
            sl.save(tmp_path, pipe, step=1)
    assert names(tmp_path) == ["step-00000001", "step-00000001.partial"]
    sl.save(tmp_path, pipe, step=2)
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


def test_checkpoint_being_written_by_another_process_is_kept(
    tmp_path: Path, pipe: sl.Pipeline
) -> None:
    with ExitStack() as held:
        theirs = folders.create_partial(tmp_path, 1, held)
        (theirs / "shard-00001.safetensors").write_text("half")
        sl.save(tmp_path, pipe, step=1)
        sl.save(tmp_path, pipe, step=1)
        assert names(tmp_path) == ["step-00000001", "step-00000001.partial"]
        assert names(theirs) == ["shard-00001.safetensors"]
    sl.save(tmp_path, pipe, step=2)  # they are gone now
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


def test_lock_ends_with_its_process(tmp_path: Path, pipe: sl.Pipeline) -> None:
    script = f"""
from contextlib import ExitStack
from pathlib import Path
import os, signal
from stageline.checkpoint.folder import create_partial
held = ExitStack()
create_partial(Path({str(tmp_path)!r}), 1, held)
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", script], check=False, timeout=100)
    assert names(tmp_path) == ["step-00000001.partial"]
    sl.save(tmp_path, pipe, step=1)
    assert names(tmp_path) == ["step-00000001"]


def test_concurrent_saves_leave_complete_checkpoints(tmp_path: Path) -> None:
    pipes = [pipeline(init=number) for number in range(3)]
    start = Barrier(3)
    told: list[sl.CheckpointError] = []

    def work(number: int) -> None:
        start.wait(60)
        for round_ in range(5):
            try:
                sl.save(tmp_path, pipes[number], step=10 * round_ + number, keep=2)
            except sl.CheckpointError as error:
                told.append(error)

    threads = [Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert told == []
    found = names(tmp_path)
    assert len(found) >= 2  # a save may not see one that is just coming, and so not delete it
    for name in found:
        number = sl.load(tmp_path / name, pipe := pipeline(init=9)).step % 10
        for key, tensor in pipe.state_dict().items():
            assert torch.equal(tensor, pipes[number].state_dict()[key])
    sl.save(tmp_path, pipes[0], step=50, keep=2)
    assert len(names(tmp_path)) == 2


def test_a_folder_that_is_being_deleted_as_a_leftover_is_not_written_to(
    tmp_path: Path, pipe: sl.Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process made it, and would lock it while it is being deleted."""
    made = tmp_path / "step-00000001.partial"
    made.mkdir()
    claimed = []

    def delete(path: Path) -> None:
        with ExitStack() as held:
            claimed.append(folders._lock(path, held))

    monkeypatch.setattr(folders, "_delete_tree", delete)
    sl.save(tmp_path, pipe, step=2)
    assert claimed == [False]


@pytest.mark.parametrize("crash", range(6))
def test_crash_while_a_step_is_saved_again_loses_nothing(
    tmp_path: Path, pipe: sl.Pipeline, monkeypatch: pytest.MonkeyPatch, crash: int
) -> None:
    """With one checkpoint only, so there is no other to go back to."""
    sl.save(tmp_path, pipe, step=1, keep=1, data="first")
    calls = iter(range(100))

    def dying(works: Any) -> Any:
        def act(*args: Any, **kwargs: Any) -> Any:
            if next(calls) >= crash:
                raise KeyboardInterrupt  # and nothing more is done, as after a SIGKILL
            return works(*args, **kwargs)

        return act

    with monkeypatch.context() as patch:
        for name in ("rename", "mkdir"):
            patch.setattr(Path, name, dying(getattr(Path, name)))
        for name in ("_delete_tree", "_write_file", "discard"):
            patch.setattr(folders, name, dying(getattr(folders, name)))
        try:
            sl.save(tmp_path, pipe, step=1, keep=1, data="second")
        except KeyboardInterrupt:
            assert crash < 6
    latest = sl.latest(tmp_path)
    assert latest is not None
    assert sl.load(tmp_path, pipe).data in ("first", "second")
    sl.save(tmp_path, pipe, step=2, keep=2)
    assert names(tmp_path) == ["step-00000001", "step-00000002"]
    assert sl.load(tmp_path / "step-00000001", pipe).data in ("first", "second")


@pytest.mark.parametrize("phase", range(5))
def test_full_disk_in_any_phase_keeps_existing_checkpoints(
    tmp_path: Path, pipe: sl.Pipeline, monkeypatch: pytest.MonkeyPatch, phase: int
) -> None:
    """The shard, the record, and the names of files, of which the last one is of a whole save."""
    sl.save(tmp_path, pipe, step=1)
    calls, works = iter(range(100)), os.fsync

    def sync(handle: int) -> None:
        if next(calls) == phase:
            raise OSError(28, "No space left on device")
        works(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", sync)
        if phase == 4:  # there are four
            sl.save(tmp_path, pipe, step=2)
        else:
            with pytest.raises(
                sl.CheckpointError, match=r"No space left on device.*free some space"
            ):
                sl.save(tmp_path, pipe, step=2)
    whole = ["step-00000001", "step-00000002"] if phase >= 3 else ["step-00000001"]
    assert names(tmp_path) == whole
    for number, name in enumerate(whole, start=1):
        assert sl.load(tmp_path / name, pipe).step == number
