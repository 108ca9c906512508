"""What else may be in a folder of checkpoints, who else may write there, and with which rights."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from threading import Barrier, Thread
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.test_checkpoint import pipeline

import stageline as sl
from stageline.checkpoint import folder as folders


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def pipe() -> sl.Pipeline:
    return pipeline()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_saves_go_on_beside_what_is_not_ours(tmp_path: Path, pipe: sl.Pipeline) -> None:
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


def test_a_copy_under_another_name_is_never_deleted(tmp_path: Path, pipe: sl.Pipeline) -> None:
    sl.save(tmp_path, pipe, step=1)
    shutil.copytree(tmp_path / "step-00000001", tmp_path / "step-best")
    for step in (2, 3, 4):
        sl.save(tmp_path, pipe, step=step, keep=1)
    assert names(tmp_path) == ["step-00000004", "step-best"]
    assert sl.load(tmp_path / "step-best", pipe).step == 1


def test_a_checkpoint_behind_a_link_is_read_and_only_the_link_is_deleted(
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
def test_the_name_of_a_checkpoint_that_is_taken_is_told_before_anything_is_written(
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


def test_a_leftover_that_cannot_be_deleted_is_told_and_saves_go_on(
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


def test_what_another_process_is_writing_is_left_alone(tmp_path: Path, pipe: sl.Pipeline) -> None:
    with ExitStack() as held:
        theirs = folders.create_partial(tmp_path, 1, held)
        (theirs / "shard-00001.safetensors").write_text("half")
        sl.save(tmp_path, pipe, step=1)
        sl.save(tmp_path, pipe, step=1)
        assert names(tmp_path) == ["step-00000001", "step-00000001.partial"]
        assert names(theirs) == ["shard-00001.safetensors"]
    sl.save(tmp_path, pipe, step=2)  # they are gone now
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


def test_a_lock_ends_with_its_process(tmp_path: Path, pipe: sl.Pipeline) -> None:
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


def test_several_savers_at_once_leave_whole_checkpoints(tmp_path: Path) -> None:
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
    assert 1 <= len(found) <= 4  # who comes last keeps two, and may not see one that is just coming
    for name in found:
        number = sl.load(tmp_path / name, pipe := pipeline(init=9)).step % 10
        for key, tensor in pipe.state_dict().items():
            assert torch.equal(tensor, pipes[number].state_dict()[key])


@pytest.mark.parametrize("crash", range(6))
def test_a_crash_at_any_point_of_saving_a_step_again_loses_nothing(
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
def test_a_full_disk_in_any_phase_leaves_what_was_there(
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


@pytest.mark.parametrize("name", ["a [b]*?", "ümlaut\n", "'\"\\", "step-00000001", "\udcff", "-x"])
def test_folders_may_have_any_name(tmp_path: Path, pipe: sl.Pipeline, name: str) -> None:
    folder = tmp_path / name
    sl.save(folder, pipe, step=1)
    sl.save(folder, pipe, step=2)
    assert sl.load(folder, pipe).step == 2
    sl.export(folder / f"{name}.safetensors", pipe)
    assert names(folder) == sorted([f"{name}.safetensors", "step-00000001", "step-00000002"])


def test_paths_that_cannot_be_are_told(tmp_path: Path, pipe: sl.Pipeline) -> None:
    (tmp_path / "file").write_text("")
    for wrong in ("a\0b", "x" * 300, tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(sl.CheckpointError, match="could not be written"):
            sl.save(wrong, pipe, step=1)
        with pytest.raises(sl.CheckpointError):
            sl.load(wrong, pipe)
    for wrong in ("a\0b", "x" * 300, tmp_path, tmp_path / "file" / "run", tmp_path / "no" / "x"):
        with pytest.raises(sl.CheckpointError, match="could not be written"):
            sl.export(wrong, pipe)
    for step in (10**15, 10**5000):
        with pytest.raises(sl.CheckpointError, match="step is "):
            sl.save(tmp_path, pipe, step=step)
    assert names(tmp_path) == ["file"]


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o077])
def test_files_have_the_rights_that_the_umask_leaves(
    tmp_path: Path, pipe: sl.Pipeline, umask: int
) -> None:
    before = os.umask(umask)
    try:
        sl.save(tmp_path / "run", pipe, step=1)
        sl.export(tmp_path / "model.safetensors", pipe)
    finally:
        os.umask(before)
    made = list(tmp_path.rglob("*"))
    assert len(made) == 5
    for path in made:
        wanted = (0o777 if path.is_dir() else 0o666) & ~umask
        assert stat.S_IMODE(path.stat().st_mode) == wanted, path


def test_exports_go_on_beside_what_is_not_theirs(tmp_path: Path, pipe: sl.Pipeline) -> None:
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


@pytest.mark.skipif(sys.platform == "win32" or os.geteuid() != 0, reason="takes another user")
def test_rights_that_are_missing_are_told(tmp_path: Path) -> None:
    """As a user who may read but not write, or neither; root may do everything."""
    script = f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
import torch, pytest
import stageline as sl
from pathlib import Path
from tests.test_checkpoint import pipeline
pipe = pipeline()
torch.set_num_threads(1)
folder = Path({str(tmp_path)!r})
for parent in (folder, *folder.parents):
    if parent.stat().st_uid == 0 and len(parent.parts) > 2:
        parent.chmod(0o755)
sl.save(folder, pipe, step=1)
whole = folder / "step-00000001"
os.seteuid(65534)
assert sl.load(folder, pipe).step == 1
for act in (lambda: sl.save(folder, pipe, step=2), lambda: sl.export(folder / "x", pipe)):
    with pytest.raises(sl.CheckpointError, match="Permission denied"):
        act()
os.seteuid(0)
for path, mode in ((whole / "checkpoint.json", 0), (whole / "shard-00001.safetensors", 0),
                   (whole, 0), (whole, 0o444), (folder, 0), (folder, 0o444)):
    before = path.stat().st_mode
    path.chmod(mode)
    os.seteuid(65534)
    with pytest.raises(sl.CheckpointError, match="Permission denied|has no"):
        sl.load(folder, pipe)
    with pytest.raises(sl.CheckpointError, match="Permission denied|has no"):
        sl.load(whole, pipe)
    if path == folder:
        with pytest.raises(sl.CheckpointError, match="Permission denied"):
            sl.latest(folder)
    os.seteuid(0)
    path.chmod(before)
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], check=False, timeout=100, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
