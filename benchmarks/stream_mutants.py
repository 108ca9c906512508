"""Remove each wait, event and keep-alive of the runtime in turn: does the sanitizer notice?

    python benchmarks/stream_mutants.py             a line for each place, some minutes
    python benchmarks/stream_mutants.py --list      the places, and nothing is run
    python benchmarks/stream_mutants.py --overhead  how much longer a checked step takes

Each is removed in a copy of the tree: a wait or a keep-alive is left out, an event counts as one
that has occurred long ago, and what was queued on another stream is queued on the current one. Then
the tests of the sanitizer run, until one fails.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.mutants import ROOT, broken, copied_tree, first_failure
from benchmarks.mutations import Mutation, Source

from stageline.options import Options
from stageline.pipeline import Pipeline
from stageline.zoo.cases import CASES, make_case

RUNTIME = "src/stageline/runtime"
SIMULATION = (
    "checked_accelerator",
    "simulation",
    "access_order",
)  # what notices, not what is tried
REMOVED = {  # the call, and what takes its place
    "wait_event": "None",
    "keep_alive": "None",
    "record_stream": "None",
    "hand_over": "None",
    "record_event": "{}",  # of no stream: the simulated event that comes after nothing
    "queueing_on": "__import__('contextlib').nullcontext()",
}
TESTS = "tests/runtime/accelerators"
LAST = ("test_ranks_on_devices.py",)  # takes longest
OF_PROCESSES = ("tests/distributed/test_channels.py",)
STEPS = 9


def removals(root: Path) -> list[Mutation]:
    """Return what can be removed, in the order of the files."""
    paths = (p for p in sorted((root / RUNTIME).rglob("*.py")) if p.stem not in SIMULATION)
    return [each for path in paths for each in _of_file(path, str(path.relative_to(root)))]


def _of_file(path: Path, name: str) -> Iterator[Mutation]:
    source = Source(name, path.read_text())
    for node in ast.walk(ast.parse(source.text)):
        kind = _called(node)
        if kind in REMOVED:
            start, end = source.range(node)
            line = source.text.count("\n", 0, start) + 1
            yield Mutation(name, line, kind, start, end, source.of(node), REMOVED[kind])


def _called(node: ast.AST) -> str:
    """Return the name of the function that a node calls; `hand_over` is no method."""
    if not isinstance(node, ast.Call):
        return ""
    if isinstance(node.func, ast.Name):
        return node.func.id if node.func.id == "hand_over" else ""
    is_method = isinstance(node.func, ast.Attribute) and node.func.attr != "hand_over"
    return node.func.attr if is_method and isinstance(node.func, ast.Attribute) else ""


def try_all(found: Sequence[Mutation]) -> list[tuple[Mutation, str]]:
    """Return for each removal the test that noticed it, or an empty text."""
    results = []
    with TemporaryDirectory() as folder:
        tree = copied_tree(Path(folder) / "tree")
        for mutation in found:
            place = mutation.path.removeprefix(RUNTIME + "/")
            with broken(mutation, tree):
                test = first_failure(tree, _tests(tree, place))
            results.append((mutation, test))
            print(f"{test or 'SURVIVED':60} {place}:{mutation.line} {mutation.old}", flush=True)
    return results


def _tests(tree: Path, place: str) -> list[str]:
    """Return the tests for something that was removed, in the order in which they run."""
    files = sorted((tree / TESTS).glob("test_*.py"), key=lambda file: (file.name in LAST, file))
    tests = [str(file.relative_to(tree)) for file in files]
    return [*OF_PROCESSES, *tests] if "processes/" in place else tests


def print_table(results: Sequence[tuple[Mutation, str]]) -> None:
    table = Table("place", "removed", "noticed by")
    for mutation, test in results:
        place = f"{mutation.path.removeprefix(RUNTIME + '/')}:{mutation.line}"
        name = test.removeprefix(f"{TESTS}/") or "SURVIVED"
        table.add_row(place, mutation.old, name, style=None if test else "bold red")
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def overheads() -> Iterator[tuple[str, float, float]]:
    """Yield for each model the seconds of a step without and with the sanitizer, in turns."""
    for name in CASES:
        pipes = [_pipe(name, checks=checks) for checks in (False, True)]
        seconds: list[list[float]] = [[], []]
        batch = make_case(name).batches[0]
        for pipe in pipes:
            pipe.step(*batch)
        for _ in range(STEPS):
            for pipe, found in zip(pipes, seconds, strict=True):
                start = perf_counter()
                float(pipe.step(*batch).loss)
                found.append(perf_counter() - start)
        for pipe in pipes:
            pipe.close()
        yield name, median(seconds[0]), median(seconds[1])


def _pipe(name: str, *, checks: bool) -> Pipeline:
    case = make_case(name)
    options = Options(check_streams=checks)
    return Pipeline(case.layers, case.loss_fn, num_ranks=2, num_microbatches=8, options=options)


def print_overheads() -> None:
    table = Table("model", "step, ms", "checked, ms", "ratio")
    for name, plain, checked in overheads():
        cells = (f"{1000 * plain:.1f}", f"{1000 * checked:.1f}", f"{checked / plain:.1f}")
        table.add_row(name, *cells)
    Console().print(table)


def main(
    show: Annotated[bool, typer.Option("--list", help="List the places, and run nothing.")] = False,
    overhead: Annotated[bool, typer.Option("--overhead", help="Measure steps alone.")] = False,
    only: Annotated[str, typer.Option(help="Only places whose path contains this.")] = "",
) -> None:
    """Remove what orders streams, one place at a time, and print a table of what noticed it."""
    torch.set_num_threads(1)  # of one operator: the ranks need the cores
    os.environ["OMP_NUM_THREADS"] = "1"
    found = [each for each in removals(ROOT) if only in each.path]
    if show:
        for each in found:
            print(f"{each.path}:{each.line} {each.old}")
        return
    if not overhead:
        results = try_all(found)
        print_table(results)
        noticed = sum(bool(test) for _, test in results)
        print(f"{noticed} of {len(results)} removals noticed")
    print_overheads()
    raise SystemExit(not overhead and noticed < len(results))


if __name__ == "__main__":
    typer.run(main)
