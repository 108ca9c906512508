"""`python -m build` gives what people expect, and the studio works where only the wheel is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from itertools import chain
from pathlib import Path
from urllib.parse import urljoin
from urllib.request import urlopen

import pytest

import stageline

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "stageline"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a wheel, and the archive of sources that the wheel was built from."""
    pytest.importorskip("build")
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def wheel_in(folder: Path) -> Path:
    (wheel,) = folder.glob("*.whl")
    return wheel


def test_wheel_and_sources_have_what_they_should(built: Path) -> None:
    with zipfile.ZipFile(wheel_in(built)) as wheel:
        names = set(wheel.namelist())
        info = f"stageline-{stageline.__version__}.dist-info"
        metadata = message_from_bytes(wheel.read(f"{info}/METADATA"))
    sources = {f"stageline/{path.relative_to(SOURCE).as_posix()}" for path in _files(SOURCE)}
    assert {name for name in names if not name.startswith(info)} == sources
    assert {"stageline/py.typed", "stageline/studio/static/shared/theme.css"} <= names
    assert f"{info}/licenses/LICENSE" in names
    assert metadata["Version"] == stageline.__version__
    assert (metadata["License-Expression"], metadata["Requires-Python"]) == ("Apache-2.0", ">=3.11")
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert {"studio", "docs", "dev"} <= set(metadata.get_all("Provides-Extra", []))
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as sdist:
        tops = {name.split("/")[1] for name in sdist.getnames()}
        inside = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"src", "tests", "docs", "examples", "README.md", "LICENSE", "constraints.txt"} <= tops
    assert [name for name in inside if name.startswith(("docs/_build", "docs/_pages"))] == []


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"]


def test_the_version_is_written_in_one_place() -> None:
    assert "version" not in PROJECT
    assert PROJECT["dynamic"] == ["version"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", stageline.__version__)


def test_every_package_that_an_extra_names_has_an_exact_version() -> None:
    pins = (ROOT / "constraints.txt").read_text().lower().replace("_", "-")
    pinned = set(re.findall(r"^([\w.-]+)==", pins, re.MULTILINE))
    wanted = chain(PROJECT["dependencies"], *PROJECT["optional-dependencies"].values())
    needed = {re.split(r"[><=\[]", each)[0].lower().replace("_", "-") for each in wanted}
    assert needed - {"stageline"} - pinned == set()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_studio_works_in_a_fresh_environment(built: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "fresh"], check=True, timeout=100)
    binaries = tmp_path / "fresh" / "bin"
    install = ["install", "--quiet", "--disable-pip-version-check", "--constraint"]
    what = f"{wheel_in(built)}[studio]"
    subprocess.run(
        [binaries / "pip", *install, ROOT / "constraints.txt", what], check=True, timeout=700
    )
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    version = subprocess.check_output(
        [binaries / "stageline", "--version"], cwd=tmp_path, env=clean, text=True, timeout=60
    )
    assert version.strip() == stageline.__version__
    with subprocess.Popen(
        [binaries / "stageline", "studio"],
        cwd=tmp_path,
        env=clean | {"PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        text=True,
    ) as studio:
        try:
            assert studio.stdout
            address = studio.stdout.readline().removeprefix("studio: ").strip()
            for name in ("schedules", "plans", "runs"):
                files = re.findall(r'(?:src|href)="(static/[^"]+)"', read(urljoin(address, name)))
                assert len(files) >= 3
                assert all(read(urljoin(address, file)) for file in files)
        finally:
            studio.terminate()


def read(address: str) -> str:
    with urlopen(address, timeout=20) as answer:
        assert answer.status == 200
        text: str = answer.read().decode()
        return text
