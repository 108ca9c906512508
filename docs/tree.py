"""Write the tree of files in architecture.md, with the first sentence of each file's docstring.

python docs/tree.py
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PAGE = Path(__file__).parent / "architecture.md"
SOURCE = Path(__file__).parents[1] / "src" / "stageline"
TREE = re.compile(r"(?<=<!-- tree -->\n```\n).*?(?=```)", re.DOTALL)
IMPORT_ORDER = [  # what is not listed comes first
    *("errors", "arguments", "units", "limits", "files", "costs", "options", "schedules"),
    *(
        "deprecated",
        "report",
        "simulation",
        "runs",
        "torch_private",
        "torch_private_training",
        "model",
        "runtime",
        "planning",
    ),
    *("pipeline_setup", "pipeline", "torchgpipe", "checkpoint", "training", "integrations"),
    *("zoo", "studio", "cli", "__main__"),
]


def tree() -> str:
    """Return one line for each package and file, in import order at the top, else by name."""
    rows = [(0, "src/stageline/", ""), *_rows(SOURCE, 1)]
    width = max(len("  " * depth + name) for depth, name, _ in rows) + 2
    lines = (("  " * depth + name).ljust(width) + text for depth, name, text in rows)
    return "".join(line.rstrip() + "\n" for line in lines)


def _rows(folder: Path, depth: int) -> Iterator[tuple[int, str, str]]:
    """Yield depth, name and description; a package is described by its `__init__.py`."""
    for path in sorted(folder.iterdir(), key=_position):
        if path.suffix == ".py" and (path.name != "__init__.py" or depth == 1):
            yield depth, path.name, _summary(path)
        elif (path / "__init__.py").is_file():
            yield depth, f"{path.name}/", _summary(path / "__init__.py")
            yield from _rows(path, depth + 1)


def _position(path: Path) -> tuple[int, bool, str]:
    is_top = path.parent == SOURCE and path.stem in IMPORT_ORDER
    return IMPORT_ORDER.index(path.stem) if is_top else -1, path.is_dir(), path.name


def _summary(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    first = " ".join(text.partition("\n\n")[0].split())
    return first.removesuffix(".")


if __name__ == "__main__":
    PAGE.write_text(TREE.sub(lambda _: tree(), PAGE.read_text()))
