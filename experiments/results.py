"""Results of runs in a JSON file: a run that is there is not made again.

The file has one line for each run, with its seed, its time and the environment it was made in, so
that tables and pictures are made from the file alone.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from time import perf_counter
from typing import Any

Run = Mapping[str, Any]


class Results:
    """The runs of an experiment by name. State: the file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> dict[str, Run]:
        """Return all runs so far."""
        if not self.path.exists():
            return {}
        runs: dict[str, Run] = json.loads(self.path.read_text(encoding="utf-8"))
        return runs

    def run_once(self, name: str, run: Callable[[], Mapping[str, Any]], *, seed: int) -> Run:
        """Return the run of this name from the file, or make and store it.

        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     results = Results(Path(folder) / "results.json")
        ...     first = results.run_once("one", lambda: {"loss": 2.0}, seed=0)
        ...     again = results.run_once("one", lambda: {"loss": 3.0}, seed=0)
        >>> again["loss"], again["seed"], first == again
        (2.0, 0, True)
        """
        found = self.read().get(name)
        if found is not None:
            return found
        start = perf_counter()
        values = dict(run())
        seconds = round(perf_counter() - start, 1)
        made = values | {"seed": seed, "seconds": seconds, "environment": environment()}
        with self._locked():
            self._write(self.read() | {name: made})
        return made

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other processes from writing: parts of an experiment may run side by side."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _write(self, runs: Mapping[str, Run]) -> None:
        """Replace the file in one step, so that a kill leaves the old or the new one."""
        lines = (f"{json.dumps(name)}: {json.dumps(run)}" for name, run in sorted(runs.items()))
        unfinished = self.path.with_suffix(".part")
        unfinished.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
        unfinished.replace(self.path)


def environment() -> dict[str, str]:
    """Return what numbers and times depend on."""
    return {
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "cores": str(os.cpu_count()),
    }
