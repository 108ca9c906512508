"""Run torchgpipe's own tests of its public interface on `stageline.torchgpipe`.

python benchmarks/torchgpipe_tests.py FOLDER      FOLDER has torchgpipe's tests; about a minute

The tests are in torchgpipe's repository (not in its packages), and are not part of this project. A
copy of each file is changed in three ways, and runs with torchgpipe too, if that is installed:

- imports are from `stageline.torchgpipe`; a test that uses another name than those that it has,
  which are internals of torchgpipe, is skipped
- texts of torchgpipe's errors are not compared
- `pytest.warns(None)`, which pytest has removed, becomes `warnings.catch_warnings(record=True)`
"""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated
from xml.etree import ElementTree

import typer
from rich.console import Console
from rich.table import Table

import stageline.torchgpipe

ORIGINAL, OURS = "torchgpipe", stageline.torchgpipe.__name__
INTERNALS = frozenset(  # tests of these are of no public name
    {"test_checkpoint", "test_copy", "test_dependency", "test_microbatch", "test_phony"}
    | {"test_pipeline", "test_portal", "test_stream", "test_tracker", "test_worker"}
)
SOURCE = Path(stageline.torchgpipe.__file__).parents[2]
TIMEOUT = 600  # seconds for all tests
PLACEHOLDER = '''
import pytest
from stageline.torchgpipe.skip.scope import skip_scope

class Internal:
    """Stands for a name that only torchgpipe has: it can be called and entered, not more."""

    def __call__(self, *args, **kwargs):
        return self

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def __iter__(self):
        pytest.skip("uses an internal name of torchgpipe")

    def __getattr__(self, name):
        if name.startswith(("_", "pytest")):  # pytest asks while it collects
            raise AttributeError(name)
        pytest.skip("uses an internal name of torchgpipe")
'''
SCOPE = """

@pytest.fixture(autouse=True)
def own_scope_of_skips():
    with skip_scope({}):
        yield
"""


class Port(ast.NodeTransformer):
    """Changes a test file. State: whether it is for our package, or stays with torchgpipe."""

    def __init__(self, *, is_ours: bool) -> None:
        self.is_ours = is_ours

    def visit_ImportFrom(self, node: ast.ImportFrom) -> list[ast.stmt]:
        module = node.module or ""
        if not self.is_ours or module.split(".")[0] != ORIGINAL:
            return [node]
        node.module = module.replace(ORIGINAL, OURS, 1)
        return [self._imported(node.module, alias) for alias in node.names]

    def _imported(self, module: str, alias: ast.alias) -> ast.stmt:
        if _exists(module, alias.name):
            return ast.ImportFrom(module, [alias], 0)
        name = alias.asname or alias.name
        return ast.parse(f"{name} = __import__('internals').Internal()").body[0]

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        function = ast.unparse(node.func)
        if function == "pytest.raises":
            node.keywords = [k for k in node.keywords if not isinstance(k.value, ast.Constant)]
        if function == "pytest.warns" and ast.unparse(node.args[0]) == "None":
            return ast.parse("__import__('warnings').catch_warnings(record=True)", mode="eval").body
        return node

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        self.generic_visit(node)
        return ast.Pass() if ".value)" in ast.unparse(node.test) else node


def main(
    folder: Annotated[Path, typer.Argument(help="The folder of torchgpipe's tests.", exists=True)],
) -> None:
    found = {OURS: _outcomes(folder, is_ours=True)}
    if find_spec(ORIGINAL):
        found[ORIGINAL] = _outcomes(folder, is_ours=False)
    for table in (_counts(found), _differences(found)):
        Console().print(table)


def _exists(module: str, name: str) -> bool:
    try:
        return hasattr(importlib.import_module(module), name)
    except ImportError:
        return False


def _outcomes(folder: Path, *, is_ours: bool) -> dict[str, str]:
    """Return how each test ends: passed, failed or skipped."""
    with TemporaryDirectory() as where:
        target = Path(where)
        (target / "internals.py").write_text(PLACEHOLDER)
        (target / "pytest.ini").write_text("[pytest]\n")
        for path in sorted(folder.rglob("*.py")):
            if path.stem not in INTERNALS:
                _port(path, target / path.relative_to(folder), is_ours=is_ours)
        command = [sys.executable, "-m", "pytest", "-q", "--junitxml", "results.xml", "."]
        environment = os.environ | {"PYTHONPATH": f"{SOURCE}:{target}"}
        subprocess.run(
            command, cwd=target, env=environment, capture_output=True, timeout=TIMEOUT, check=False
        )
        return dict(_results(ElementTree.parse(target / "results.xml").getroot()))


def _port(source: Path, target: Path, *, is_ours: bool) -> None:
    tree = ast.fix_missing_locations(Port(is_ours=is_ours).visit(ast.parse(source.read_text())))
    text = ast.unparse(tree)
    if is_ours and target.name == "conftest.py":
        text = f"from internals import pytest, skip_scope\n{text}{SCOPE}"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)


def _results(suite: ElementTree.Element) -> Iterator[tuple[str, str]]:
    for case in suite.iter("testcase"):
        yield f"{case.get('classname')}::{case.get('name')}", _ended(case)


def _ended(case: ElementTree.Element) -> str:
    """Return how a test ended; one that torchgpipe marks as expected to fail may pass."""
    for child in case:
        if child.tag in ("failure", "error"):
            is_fixed = "[XPASS(strict)]" in (child.get("message") or "") + (child.text or "")
            return "passed (xfail)" if is_fixed else "failed"
        if child.tag == "skipped":
            return "failed (xfail)" if child.get("type") == "pytest.xfail" else "skipped"
    return "passed"


def _counts(found: Mapping[str, Mapping[str, str]]) -> Table:
    kinds = sorted({kind for outcomes in found.values() for kind in outcomes.values()})
    table = Table("", *kinds)
    for library, outcomes in found.items():
        counts = Counter(outcomes.values())
        table.add_row(library, *(str(counts[kind]) for kind in kinds))
    return table


def _differences(found: Mapping[str, Mapping[str, str]]) -> Table:
    """Return the tests that do not pass with all libraries, except those that all skip."""
    table = Table("test", *found)
    for name in sorted(set[str]().union(*found.values())):
        row = [outcomes.get(name, "-") for outcomes in found.values()]
        if {*row} not in ({"passed"}, {"skipped"}):
            table.add_row(name, *row)
    return table


if __name__ == "__main__":
    typer.run(main)
