"""sl.save: a checkpoint that is complete or not there."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from torch.optim import Optimizer

from stageline.arguments import check_size
from stageline.checkpoint import folder as folders
from stageline.checkpoint.contents import (
    Options,
    Record,
    SchedulerState,
    merged,
    optimizers_of,
    part_of,
    same_scheduler,
)
from stageline.checkpoint.desk import Desk, Saving, desk_of
from stageline.checkpoint.storage import File, Piece, check_all_there, pieces_of, refusal, write
from stageline.checkpoint.values import encode
from stageline.errors import CheckpointError
from stageline.pipeline import Pipeline

MOST_STEPS = 10**15


@dataclass(frozen=True)
class Job:
    """What one process has to write, and where."""

    folder: Path
    record: Record  # still without its files
    keep: int
    process: int  # its place among those that take part
    pieces: Mapping[str, Piece]


def save(
    folder: str | os.PathLike[str],
    pipe: Pipeline,
    optimizer: Optimizer | None = None,
    *,
    step: int,
    data: Any = None,
    keep: int = 2,
    wait: bool = True,
) -> Saving:
    """Save a pipeline and its optimizer as `folder/step-00000100`; all ranks call it.

    `data` is a value of your own, of numbers, text, None, and lists, tuples and dicts of them, such
    as where the data loader stands. The last `keep` checkpoints stay, older ones are deleted. With
    `wait=False` the state is copied, and written while training goes on: `wait()` of what is
    returned raises what went wrong. Of a pipeline with optimizers of its own, these are saved.
    """
    check_size("keep", keep)
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise CheckpointError(f"step is {step!r}, but has to be a whole number from 0 up")
    if step >= MOST_STEPS:
        raise CheckpointError("step is too large: it has to be a whole number below 10**15")
    desk = desk_of(pipe)
    desk.settle()
    part = desk.agreed(lambda: part_of(pipe, optimizers_of(pipe, optimizer)))
    pieces = desk.agreed(lambda: pieces_of(part.tensors, copy=not wait))
    process, mine, parts = divided(desk, pieces, part.fields)
    fields = {"step": step, "num_steps": pipe.num_steps, "seed": pipe.seed}
    record = desk.agreed(lambda: _record(fields | {"data": encode("data", data)}, parts))
    job = Job(Path(folder), record, keep, process, mine)
    saving = desk.save(lambda own: _write(own, job), in_background=not wait)
    if wait:
        saving.wait()
    return saving


def divided(
    desk: Desk, pieces: Mapping[str, Piece], fields: Mapping[str, Any]
) -> tuple[int, dict[str, Piece], list[dict[str, Any]]]:
    """Return this process's place, the pieces that it writes, and the `fields` of all processes.

    Of processes that hold the same, the first writes it.
    """
    token = uuid4().hex
    held = [[name, list(piece.offset)] for name, piece in pieces.items()]
    here: dict[str, Any] = {"token": token, "held": held, "fields": dict(fields)}
    everyone = desk.everywhere(here)
    process = [there["token"] for there in everyone].index(token)
    writers: dict[tuple[str, tuple[int, ...]], int] = {}
    for rank, there in enumerate(everyone):
        for name, offset in there["held"]:
            writers.setdefault((name, tuple(offset)), rank)
    mine = {n: piece for n, piece in pieces.items() if writers[n, piece.offset] == process}
    return process, mine, [there["fields"] for there in everyone]


def _record(fields: dict[str, Any], parts: list[dict[str, Any]]) -> Record:
    groups = [Options(**group) for part in parts for group in part["groups"]]
    states = [part["scheduler"] and SchedulerState(**part["scheduler"]) for part in parts]
    try:
        return Record.of(
            fields
            | {
                "number": 0,
                "files": (),
                "groups": merged(groups),
                "values": {name: v for part in parts for name, v in part["values"].items()},
                "scheduler": same_scheduler(states),
            }
        )
    except ValueError as error:
        raise CheckpointError(f"what is to be saved makes no checkpoint: {error}") from error


def _write(desk: Desk, job: Job) -> Path:
    with ExitStack() as held:
        temporary = Path(desk.by_first(lambda: str(_begin(job, held))))
        try:
            written = desk.agreed(lambda: _write_file(job, temporary))
            files = [File(**fields) for fields in desk.everywhere(written) if fields]
            return Path(desk.by_first(lambda: str(_complete(job, temporary, files))))
        except BaseException:
            if desk.is_first:
                folders.abandon(temporary)
            raise


def _begin(job: Job, held: ExitStack) -> Path:
    with told(job.folder):
        return folders.begin(job.folder, job.record.step, held)


def _write_file(job: Job, temporary: Path) -> dict[str, Any] | None:
    """Write this process's tensors, if there are any, and return the fields of its `File`."""
    if not job.pieces:
        return None
    with told(job.folder):
        return write(temporary / f"shard-{job.process + 1:05d}.safetensors", job.pieces)


def _complete(job: Job, temporary: Path, files: list[File]) -> Path:
    fields = job.record.fields | {"files": [file.__dict__ for file in files]}
    with told(job.folder):
        check_all_there(temporary, files)
        return folders.complete(
            temporary,
            f"step-{job.record.step:08d}",
            lambda number: fields | {"number": number},
            job.keep,
        )


@contextmanager
def told(folder: Path) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a path with a null byte
        raise refusal(folder, error) from error
