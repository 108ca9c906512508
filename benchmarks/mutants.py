"""Break lines of the runtime one at a time, and see which of them the tests notice.

    python benchmarks/mutants.py                    40 lines, an hour or two
    python benchmarks/mutants.py --count 4 --jobs 2
    python benchmarks/mutants.py --seed 1 --package planning

Lines are chosen by the seed, evenly over files and kinds of change. Each is broken in a copy of the
tree. Tests of its module run first, then the rest, until one fails; that test has to fail again,
and to pass without the change. Results are kept in a file, from which another run goes on.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Queue
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TimeElapsedColumn
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.mutations import Mutation, choose, mutations

ROOT = Path(__file__).parents[1]
SKIPPED = (".git", ".venv", "__pycache__", ".*_cache", ".hypothesis")
PATIENCE = 1800.0  # seconds that one part of the suite may take
PYTEST = ("-m", "pytest", "-q", "-x", "--tb=no", "-rfE", "-m", "not slow", "-p", "no:cacheprovider")
FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)
NO_TEST = "no test"
NOTICED, SURVIVED, UNCLEAR = "noticed", "survived", "unclear"


@dataclass(frozen=True)
class Verdict:
    """What became of one mutation."""

    key: str
    path: str
    line: int
    kind: str
    change: str
    outcome: str  # noticed, survived; unclear if a test does not fail by the mutation alone
    test: str  # the first that failed
    seconds: float


def main(
    count: Annotated[int, typer.Option(help="Lines to break.")] = 40,
    seed: Annotated[int, typer.Option(help="Chooses the lines and the changes.")] = 0,
    package: Annotated[str, typer.Option(help="Package of src/stageline to break.")] = "runtime",
    jobs: Annotated[int, typer.Option(help="Mutants tested concurrently.")] = 1,
    results: Annotated[
        Path, typer.Option(help="File for the results; what it already has is not run again.")
    ] = Path("mutants.json"),
    show: Annotated[
        bool, typer.Option("--list", help="List the mutants, and run nothing.")
    ] = False,
) -> None:
    """Break lines one at a time and print a table of which the tests notice."""
    folder = ROOT / "src" / "stageline" / package
    chosen = choose(mutations(ROOT, folder.rglob("*.py")), count, seed)
    if show:
        for each in chosen:
            print(f"{each.path}:{each.line} {each.kind}: {each.change}")
        return
    verdicts = _read(results)
    unclear = {key for key, verdict in verdicts.items() if verdict.outcome == UNCLEAR}
    todo = [each for each in chosen if each.key not in verdicts.keys() - unclear]
    with Progress(
        SpinnerColumn(), *Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn()
    ) as bar:
        task = bar.add_task("mutants", total=len(chosen), completed=len(chosen) - len(todo))
        for verdict in _run_all(todo, jobs):
            verdicts[verdict.key] = verdict
            _write(results, verdicts)
            bar.update(task, advance=1)
            line = f"{verdict.outcome:8} {verdict.path}:{verdict.line} {verdict.test}"
            bar.console.print(line, soft_wrap=True, markup=False)
    found = [verdicts[each.key] for each in chosen]
    _print_table(found)
    noticed = sum(verdict.outcome == NOTICED for verdict in found)
    print(f"{noticed} of {len(found)} mutants noticed (seed {seed})")
    raise SystemExit(noticed < 0.95 * len(found))


def _run_all(todo: Sequence[Mutation], jobs: int) -> Iterator[Verdict]:
    """Yield verdicts as they come; each job has a copy of the tree."""
    with TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        Path(folder).chmod(0o755)  # a test reads the tree as another user
        trees: Queue[Path] = Queue()
        for number in range(jobs):
            trees.put(copied_tree(Path(folder) / f"tree-{number}"))

        def run(mutation: Mutation) -> Verdict:
            tree = trees.get()
            try:
                return _verdict(mutation, tree)
            finally:
                trees.put(tree)

        try:
            for done in as_completed([pool.submit(run, each) for each in todo]):
                yield done.result()
        finally:
            pool.shutdown(cancel_futures=True)


def copied_tree(copy: Path) -> Path:
    """Copy the tree to where lines of it are broken."""
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*SKIPPED), symlinks=True)
    return copy


def _verdict(mutation: Mutation, tree: Path) -> Verdict:
    start = monotonic()
    outcome, test = SURVIVED, ""
    for tests in _rounds(tree, mutation.path):
        with broken(mutation, tree):
            test = first_failure(tree, tests)
        if test:
            outcome = NOTICED if _is_due_to(mutation, tree, test, tests) else UNCLEAR
            break
    return Verdict(
        mutation.key,
        mutation.path,
        mutation.line,
        mutation.kind,
        mutation.change,
        outcome,
        test,
        round(monotonic() - start, 1),
    )


def _is_due_to(mutation: Mutation, tree: Path, test: str, tests: Sequence[str]) -> bool:
    """Return whether the test fails with the mutation again, and passes without it."""
    if test.startswith(NO_TEST):
        return True
    again = [test] if "::" in test else [*tests, "--collect-only"]  # a file that was not imported
    with broken(mutation, tree):
        fails = bool(first_failure(tree, again))
    return fails and not first_failure(tree, again)


@contextmanager
def broken(mutation: Mutation, tree: Path) -> Iterator[None]:
    path = tree / mutation.path
    text = path.read_text()
    path.write_text(mutation.apply(text))
    try:
        yield
    finally:
        path.write_text(text)


def _rounds(tree: Path, path: str) -> list[list[str]]:
    """Return parts of the suite: first what names the module, last what takes longest."""
    module = ".".join(Path(path).with_suffix("").parts[1:])
    package, _, name = module.rpartition(".")
    words = (module, f"from {package} import {name}")
    files = sorted((tree / "tests").rglob("test_*.py"), key=lambda file: file.stat().st_size)
    named = [
        str(file.relative_to(tree))
        for file in files
        if file.stem == f"test_{name}" or any(word in file.read_text() for word in words)
    ]
    near = f"tests/{Path(path).parts[2]}"  # tests mirror the packages of the source
    distributed = ["tests/distributed"]
    rounds = [[path, *named], [near] if (tree / near).is_dir() else []]
    rounds += [["tests", "src", "--ignore", *distributed], distributed]
    if "processes" in path:
        rounds = [rounds[0], distributed, *rounds[1:3]]
    return [each for each in rounds if each]


def first_failure(tree: Path, tests: Sequence[str]) -> str:
    """Return the first test that fails, or nothing if all of them pass."""
    environment = os.environ | {"PYTHONPATH": str(tree / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    with subprocess.Popen(
        [sys.executable, *PYTEST, *tests],
        cwd=tree,
        env=environment | {"CI": "1"},  # the same examples of property tests every time
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return f"{NO_TEST} in particular: no end after {PATIENCE:g} s"
    if process.returncode in (0, 5):  # passed, or has no tests
        return ""
    found = FAILED.search(output)
    if found:
        return found[1]
    return f"{NO_TEST} in particular: pytest ended with {process.returncode}, {output[-300:]}"


def _print_table(verdicts: Sequence[Verdict]) -> None:
    table = Table("file", "line", "mutation", "change", "outcome", "first test that failed", "s")
    for each in verdicts:
        style = None if each.outcome == NOTICED else "bold red"
        name = each.path.removeprefix("src/stageline/")
        cells = (name, str(each.line), each.kind, each.change, each.outcome, each.test)
        table.add_row(*cells, f"{each.seconds:.0f}", style=style)
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def _read(path: Path) -> dict[str, Verdict]:
    found = json.loads(path.read_text()) if path.exists() else []
    return {each["key"]: Verdict(**each) for each in found}


def _write(path: Path, verdicts: dict[str, Verdict]) -> None:
    new = path.with_suffix(".new")
    new.write_text(json.dumps([asdict(each) for each in verdicts.values()], indent=1))
    new.replace(path)


if __name__ == "__main__":
    typer.run(main)
