"""Names, paths and permissions of folders and files that checkpoints are written to."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import stageline as sl


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("name", ["a [b]*?", "ümlaut\n", "'\"\\", "step-00000001", "\udcff", "-x"])
def test_folders_may_have_any_name(tmp_path: Path, pipe: sl.Pipeline, name: str) -> None:
    folder = tmp_path / name
    sl.save(folder, pipe, step=1)
    sl.save(folder, pipe, step=2)
    assert sl.load(folder, pipe).step == 2
    sl.export(folder / f"{name}.safetensors", pipe)
    assert names(folder) == sorted([f"{name}.safetensors", "step-00000001", "step-00000002"])


def test_invalid_paths_are_refused(tmp_path: Path, pipe: sl.Pipeline) -> None:
    (tmp_path / "file").write_text("")
    for wrong in ("a\0b", "x" * 300, tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(sl.CheckpointError, match="could not be written"):
            sl.save(wrong, pipe, step=1)
        with pytest.raises(sl.CheckpointError):
            sl.load(wrong, pipe)
    no_folder = tmp_path / "no" / "x.safetensors"
    for wrong in ("a\0b", "x" * 300, "", tmp_path / "file" / "run", no_folder):
        with pytest.raises(sl.CheckpointError, match=r"could not be written|has to name a file"):
            sl.export(wrong, pipe)
    with pytest.raises(sl.CheckpointError, match="file' is a file, but a path without"):
        sl.export(tmp_path / "file", pipe)
    for step in (10**15, 10**5000):
        with pytest.raises(sl.CheckpointError, match="step is "):
            sl.save(tmp_path, pipe, step=step)
    assert names(tmp_path) == ["file"]


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o077])
def test_permissions_follow_the_umask(tmp_path: Path, pipe: sl.Pipeline, umask: int) -> None:
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


@pytest.mark.skipif(sys.platform == "win32" or os.geteuid() != 0, reason="takes another user")
def test_missing_permissions_are_reported(tmp_path: Path) -> None:
    """As a user who may read but not write, or neither; root may do everything."""
    script = f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
import torch, pytest
import stageline as sl
from pathlib import Path
from tests.checkpoint.pipelines import pipeline
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
