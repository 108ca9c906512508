"""The folder whose runs are shown. A run is found by its name in the list, never by a path."""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections.abc import Iterable
from pathlib import Path

from stageline.arguments import shown
from stageline.errors import ReportError
from stageline.runs.read import list_runs
from stageline.runs.records import EVENTS, METRICS, RUN, TIMELINE
from stageline.runs.run import RunSummary

PLAIN_NAME = re.compile(r"[A-Za-z0-9_.-]{1,80}")


class RunsFolder:
    """Runs in one folder. State: the list as it was last read, and the version it was read at."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lock = threading.Lock()  # requests are answered by several threads
        self.runs: dict[str, RunSummary] = {}
        self.version = ""

    def current(self) -> tuple[str, dict[str, RunSummary]]:
        """Return the runs by key, the latest first, and a version that differs if one has changed.

        Files are read only then: else the dates of all files are all that is looked at.
        """
        with self.lock:
            version = version_of(self._places())
            if version != self.version:
                self.runs = {self._key(run.folder): run for run in list_runs(self.folder)}
                self.version = version
            return self.version, self.runs

    def find(self, key: str) -> Path:
        """Return the folder of a listed run; raise `ReportError` if there is none."""
        run = self.current()[1].get(key)
        if run is None or run.folder.is_symlink():
            raise ReportError(
                f"there is no run {shown(key)} in this folder: use one of the list; links and "
                "folders elsewhere are not read"
            )
        return run.folder

    def _key(self, folder: Path) -> str:
        """Return the name by which the page asks for a run: that of its folder if it is plain."""
        if folder == self.folder:
            return "."
        if PLAIN_NAME.fullmatch(folder.name):
            return folder.name
        return f"run~{hashlib.sha256(os.fsencode(folder.name)).hexdigest()[:12]}"

    def _places(self) -> list[Path]:
        try:
            with os.scandir(self.folder) as entries:
                inside = [Path(each.path) for each in entries if each.is_dir(follow_symlinks=False)]
        except OSError as error:
            raise ReportError(f"the folder of runs cannot be read: {error.strerror}") from None
        return [self.folder, *sorted(inside)]


def version_of(folders: Iterable[Path]) -> str:
    """Return a text that differs if a file of these runs has changed since."""
    found = hashlib.sha256()
    for folder in folders:
        for name in (RUN, METRICS, TIMELINE, EVENTS):
            try:
                status = (folder / name).lstat()
            except OSError:
                continue
            found.update(repr((str(folder), name, status.st_mtime_ns, status.st_size)).encode())
    return found.hexdigest()[:16]
