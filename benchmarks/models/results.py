"""Results by model, in a JSON file from which an interrupted run goes on."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from importlib import metadata
from pathlib import Path
from threading import Lock
from typing import Any

from benchmarks.models import catalogue
from benchmarks.models.combination import SEED, Combination
from benchmarks.models.torch_tracer import Traced

import stageline

LIBRARIES = ("torch", "transformers", "timm", "torchvision")


@dataclass
class ModelResult:
    """What was found of one model."""

    num_layers: int = 0
    faults: dict[str, str] = field(default_factory=dict)  # by combination; none if it is equal
    names: str = ""  # which names differ
    torch: Traced | None = None
    seconds: float = 0.0  # of all processes that trained it, one after another

    @property
    def num_equal(self) -> int:
        return sum(not fault for fault in self.faults.values())

    def lacks(self, combination: Combination) -> bool:
        """Return whether a combination has to be trained, because it was not, or failed."""
        return bool(self.faults.get(str(combination), "missing"))


class Results:
    """All results so far. State: these, and the file that has them."""

    def __init__(self, path: Path) -> None:
        self.path, self.lock = path, Lock()
        self.environment = environment()
        self.models: dict[str, ModelResult] = dict(_loaded(path, self.environment))

    def of(self, name: str) -> ModelResult:
        with self.lock:
            return self.models.setdefault(name, ModelResult())

    def save(self) -> None:
        """Write the file: a line for each model, so that a person can look into it."""
        with self.lock:
            lines = [
                f"{json.dumps(name)}: {json.dumps(asdict(found))}"
                for name, found in self.models.items()
            ]
            text = f'{{"environment": {json.dumps(self.environment)},\n"models": {{\n'
            unfinished = self.path.with_suffix(".part")
            unfinished.write_text(text + ",\n".join(lines) + "\n}}\n", encoding="utf-8")
            unfinished.replace(self.path)


def _loaded(path: Path, wanted: dict[str, Any]) -> Iterator[tuple[str, ModelResult]]:
    """Yield what a file has, if it was found with the same source and the same libraries."""
    if not path.exists():
        return
    content = json.loads(path.read_text(encoding="utf-8"))
    if content["environment"] != wanted:
        return
    for name, found in content["models"].items():
        traced = found.pop("torch")
        yield name, ModelResult(**found, torch=traced and Traced(**traced))


def environment() -> dict[str, Any]:
    """Return what results depend on."""
    return {
        "python": platform.python_version(),
        **{library: _version(library) for library in LIBRARIES},
        "source": _digest(Path(stageline.__file__).parent),
        "catalogue": _digest(Path(catalogue.__file__).parent),
        "cores": os.cpu_count(),
        "seed": SEED,
    }


def _version(library: str) -> str:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return "not installed"


def _digest(folder: Path) -> str:
    """Return eight letters that tell versions of the source apart."""
    found = blake2b(digest_size=4)
    for path in sorted(folder.rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()
