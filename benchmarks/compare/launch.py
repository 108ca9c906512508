"""Run cells in processes of their own, and go on after one that fails.

    todo: a b c d ──► worker group: a, b stored, c raises ──► new group: d ──► failed: c

A cell is one comparison under its name. A group of processes measures several, because to start it
takes seconds; the first process stores each one when it is finished.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from experiments.results import Results

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("worker.py")
SECONDS_OF_CELL = 1800  # of one that does not hang
TAIL = 2000  # characters of output that are shown of a failure


class Group(NamedTuple):
    """Cells that the same processes measure one after another."""

    kind: str  # of `worker.KINDS`
    num_ranks: int
    cells: Mapping[str, Any]  # by name: what `kind` needs to know
    environment: Mapping[str, str] = {}
    binds_cores: bool = False  # a core for each process, so none may have contestants in threads

    def without(self, names: Sequence[str]) -> Group:
        return self._replace(cells={n: cell for n, cell in self.cells.items() if n not in names})


class Failure(NamedTuple):
    """A cell that was not measured, with the last lines of its processes."""

    name: str
    output: str


def run_groups(
    groups: Sequence[Group], results: Results, show: Callable[[str], None]
) -> list[Failure]:
    """Measure the cells that are not stored yet; return those that failed."""
    failures = []
    for group in groups:
        skipped: list[str] = []
        while (todo := group.without([*results.read(), *skipped])).cells:
            show(f"{todo.kind}: {next(iter(todo.cells))}")
            output = launch(todo, results)
            left = todo.without(list(results.read())).cells
            if left:
                failed = next(iter(left))
                skipped.append(failed)
                failures.append(Failure(failed, output[-TAIL:]))
    return failures


def launch(group: Group, results: Results) -> str:
    """Start a group and wait for it; return what its processes printed."""
    with TemporaryDirectory() as folder:
        job = Path(folder) / "job.json"
        job.write_text(
            json.dumps({"kind": group.kind, "cells": dict(group.cells)}), encoding="utf-8"
        )
        binding = "--bind-cores" if group.binds_cores else "--no-bind-cores"
        command = [sys.executable, "-m", "stageline", "run", binding]
        command += ["--num-processes", str(group.num_ranks), str(WORKER)]
        command += [str(job), str(results.path.resolve())]
        seconds = SECONDS_OF_CELL * len(group.cells)
        return output_of(command, {"PYTHONPATH": search_path()} | dict(group.environment), seconds)


def output_of(command: Sequence[str], environment: Mapping[str, str], seconds: float) -> str:
    """Run a command; if it takes too long, or this process is interrupted, end all of its ranks."""
    with subprocess.Popen(
        command,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            return process.communicate(timeout=seconds)[0]
        except subprocess.TimeoutExpired:
            process.terminate()  # `stageline run` ends its ranks, and then itself
            return f"{process.communicate()[0]}\nno end after {seconds:.0f} s"
        except BaseException:
            process.terminate()
            raise


def search_path() -> str:
    """Return where processes find this package, which is not installed."""
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
