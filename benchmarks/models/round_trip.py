"""Write every transformers model of the catalogue with `sl.export`, and read it in again.

    python -m benchmarks.models.round_trip

A pipeline's weights go to a folder in several shards, from there into `from_pretrained`, and into
another pipeline with `sl.load_pretrained`. All tensors have to have the same bits.
"""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from benchmarks.models.case import Case
from benchmarks.models.catalogue import FAMILIES, catalogue, make_case
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn

import stageline as sl

SIZES = {"num_ranks": 2, "num_microbatches": 2, "backend": "serial"}


def main() -> None:
    """Print a table of models, and exit with 1 if a tensor differs."""
    warnings.simplefilter("ignore")
    chosen = sys.argv[1:] or of_transformers()
    table = Table("model", "tensors", "files", "from_pretrained", "load_pretrained")
    num_equal = 0
    for name in track(chosen, "models", console=Console(stderr=True)):
        case = make_case(name)
        with TemporaryDirectory() as folder:
            row = round_trip(case, Path(folder) / "model")
        num_equal += row[-2:] == ["equal", "equal"]
        table.add_row(name, *row)
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    print(f"{num_equal} of {len(chosen)} models came back with the same bits")
    raise SystemExit(num_equal < len(chosen))


def of_transformers() -> list[str]:
    """Return the names of the models that have `from_pretrained`."""
    modules = [each for each, libraries in FAMILIES.items() if libraries == ("transformers",)]
    cases = [import_module(f"benchmarks.models.catalogue.{name}").CASES for name in modules]
    own = {name for found in cases for name in found}
    return [name for name in catalogue() if name in own]


def round_trip(case: Case, folder: Path) -> list[str]:
    """Return a row of the table."""
    model, (inputs, _) = case.model, case.batch(4, 0)
    with sl.Pipeline(model, example_inputs=inputs, **SIZES) as pipe:  # type: ignore[arg-type]
        sl.export(folder, pipe, max_shard_size="20KB")
    files = len(list(folder.glob("*.safetensors")))
    cells = [str(len(model.state_dict())), str(files)]
    for load in (_from_pretrained, _load_pretrained):
        try:
            cells.append(_difference(model, load(case, folder)))
        except Exception as error:  # whatever the libraries raise is a row of the table
            cells.append(f"{type(error).__name__}: {error}"[:80])
    return cells


def _from_pretrained(case: Case, folder: Path) -> nn.Module:
    found: nn.Module = type(case.model).from_pretrained(folder)  # type: ignore[attr-defined]
    return found


def _load_pretrained(case: Case, folder: Path) -> nn.Module:
    kind = type(case.model)
    torch.manual_seed(1)
    other: nn.Module = kind(case.model.config)
    inputs, _ = case.batch(4, 0)
    with sl.Pipeline(other, example_inputs=inputs, **SIZES) as pipe:  # type: ignore[arg-type]
        sl.load_pretrained(pipe, folder)
    return other


def _difference(model: nn.Module, other: nn.Module) -> str:
    expected, found = model.state_dict(), other.state_dict()
    if expected.keys() != found.keys():
        return f"{len(expected.keys() ^ found.keys())} names differ"
    wrong = [name for name in expected if not torch.equal(expected[name], found[name])]
    return f"{len(wrong)} differ, such as {wrong[0]}" if wrong else "equal"


if __name__ == "__main__":
    main()
