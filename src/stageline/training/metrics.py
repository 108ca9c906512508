"""What is known of the last steps, and the files that it goes to: JSON lines and TensorBoard."""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from stageline.errors import ModelError
from stageline.report.summary import percent
from stageline.runtime import trees
from stageline.units import format_bytes

FILE, BOARD = "metrics.jsonl", "tensorboard"


@dataclass(frozen=True)
class Report:
    """Of the steps since the one before; a step of its own was measured for bubble and busy.

    In a stream no step is on its own, and they are not known.
    """

    step: int
    loss: float  # the mean over these steps
    samples_per_second: float  # of all replicas
    tokens_per_second: float | None  # if the inputs are numbers of tokens
    bubble: float | None  # idle share of all ranks
    busy: tuple[float, ...]  # share of the step, by rank
    peak_memory: tuple[int, ...]  # bytes, by process: of its device, or of itself

    def words(self) -> str:
        speed = (
            f"{self.samples_per_second:,.1f} samples/s"
            if self.tokens_per_second is None
            else f"{self.tokens_per_second:,.0f} tokens/s"
        )
        memory = format_bytes(max(self.peak_memory))
        bubble = "" if self.bubble is None else f"bubble {percent(self.bubble)}   "
        return f"loss {self.loss:.4f}   {speed}   {bubble}{memory}"


Write = Callable[[Report], None]


@contextmanager
def files(folder: Path, step: int, *, tensorboard: bool) -> Iterator[Write]:
    """Write reports; what earlier runs wrote stays, up to the step from which this one goes on."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE
    _forget(path, step)
    board = _board(folder / BOARD, step) if tensorboard else None
    with path.open("a") as lines:

        def write(report: Report) -> None:
            lines.write(json.dumps(asdict(report)) + "\n")
            lines.flush()
            if board is not None:
                for name, value in _scalars(report):
                    board.add_scalar(name, value, report.step)

        try:
            yield write
        finally:
            if board is not None:
                board.close()


def num_tokens(inputs: Any) -> int | None:
    """The numbers in the first tensor of whole ones; None if there is no such tensor."""
    kinds = (torch.int16, torch.int32, torch.int64)
    return next((t.numel() for t in trees.tensors(inputs) if t.dtype in kinds), None)


def peak_memory(devices: set[torch.device]) -> int:
    """Bytes, since the start, of this process's accelerators, or else of the process itself."""
    if cuda := [device for device in devices if device.type == "cuda"]:
        return sum(torch.cuda.max_memory_allocated(device) for device in cuda)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _scalars(report: Report) -> Iterator[tuple[str, float]]:
    for name, value in asdict(report).items():
        if isinstance(value, tuple):
            yield from ((f"{name}/{number}", part) for number, part in enumerate(value))
        elif name != "step" and value is not None:
            yield name, value


def _forget(path: Path, step: int) -> None:
    """Lines of steps that will be done again, and one that a crash left unfinished."""
    if path.exists():
        kept = [line for line in path.read_text().splitlines() if _step_of(line) <= step]
        path.write_text("".join(f"{line}\n" for line in kept))


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")


def _board(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  it may not be there
    except ImportError:
        raise ModelError(
            "tensorboard is not installed, but tensorboard=True: pip install tensorboard, or read "
            f"{FILE} instead"
        ) from None
    return SummaryWriter(str(folder), purge_step=step + 1)
