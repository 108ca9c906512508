"""sl.save: write a checkpoint that is complete or absent."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from torch.optim import Optimizer

from stageline.arguments import check_size
from stageline.checkpoint import folder as folders
from stageline.checkpoint.group import CheckpointGroup, PendingSave, checkpoint_group
from stageline.checkpoint.json_values import to_json
from stageline.checkpoint.pipeline_state import collect_state, counters_of, optimizers_of
from stageline.checkpoint.record import (
    GroupOptions,
    Record,
    SchedulerState,
    common_scheduler_state,
    merge_groups,
)
from stageline.checkpoint.write_tensors import (
    Piece,
    ShardFile,
    check_visible,
    convert_write_errors,
    local_pieces,
    shard_name,
    write_shard,
)
from stageline.errors import CheckpointError
from stageline.pipeline import Pipeline

MAX_STEP = 10**15


@dataclass(frozen=True)
class SaveJob:
    """The part of a checkpoint that one process writes, and its folder."""

    folder: Path
    record: Record  # without its files
    keep: int
    process: int  # the index of this process
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
) -> PendingSave:
    """Save a pipeline and its optimizer as `folder/step-00000100`; all ranks call it.

    `data` is any value made of numbers, strings, None, lists, tuples and dicts, such as the
    position of the data loader. The last `keep` checkpoints are kept, older ones are deleted. With
    `wait=False` the state is copied and written while training continues; `wait()` of the returned
    object raises if the save failed. If the pipeline has its own optimizers, these are saved.
    """
    check_size("keep", keep)
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise CheckpointError(f"step is {step!r}, but must be an integer of at least 0")
    if step >= MAX_STEP:
        raise CheckpointError("step is too large: it must be less than 10**15")
    group = checkpoint_group(pipe)
    group.finish_save()
    state = group.run(lambda: collect_state(pipe, optimizers_of(pipe, optimizer)))
    pieces = group.run(lambda: local_pieces(state.tensors, copy=not wait))
    process, own_pieces, parts = assign_pieces(group, pieces, state.fields)
    fields = {"step": step, **counters_of(pipe)}
    record = group.run(lambda: _make_record(fields | {"data": to_json("data", data)}, parts))
    job = SaveJob(Path(folder), record, keep, process, own_pieces)
    pending = group.start_save(lambda own: _write(own, job), in_background=not wait)
    if wait:
        pending.wait()
    return pending


def assign_pieces(
    group: CheckpointGroup, pieces: Mapping[str, Piece], fields: Mapping[str, Any]
) -> tuple[int, dict[str, Piece], list[dict[str, Any]]]:
    """Return this process's index, the pieces that it writes, and the `fields` of all processes.

    If several processes have the same piece, the first of them writes it.
    """
    token = uuid4().hex
    held = [[name, list(piece.offset)] for name, piece in pieces.items()]
    here: dict[str, Any] = {"token": token, "held": held, "fields": dict(fields)}
    everyone = group.gather(here)
    process = [there["token"] for there in everyone].index(token)
    writers: dict[tuple[str, tuple[int, ...]], int] = {}
    for rank, there in enumerate(everyone):
        for name, offset in there["held"]:
            writers.setdefault((name, tuple(offset)), rank)
    own = {n: piece for n, piece in pieces.items() if writers[n, piece.offset] == process}
    return process, own, [there["fields"] for there in everyone]


def _make_record(fields: dict[str, Any], parts: list[dict[str, Any]]) -> Record:
    groups = [GroupOptions(**group) for part in parts for group in part["groups"]]
    states = [part["scheduler"] and SchedulerState(**part["scheduler"]) for part in parts]
    try:
        return Record.of(
            fields
            | {
                "number": 0,
                "files": (),
                "groups": merge_groups(groups),
                "values": {name: v for part in parts for name, v in part["values"].items()},
                "scheduler": common_scheduler_state(states),
            }
        )
    except ValueError as error:
        raise CheckpointError(f"the state cannot be saved as a checkpoint: {error}") from error


def _write(group: CheckpointGroup, job: SaveJob) -> Path:
    with ExitStack() as held:
        temporary = Path(group.run_on_first(lambda: str(_create(job, held))))
        try:
            written = group.run(lambda: _write_pieces(job, temporary))
            files = [ShardFile(**fields) for fields in group.gather(written) if fields]
            return Path(group.run_on_first(lambda: str(_publish(job, temporary, files))))
        except BaseException:
            if group.is_first:
                folders.discard(temporary)
            raise


def _create(job: SaveJob, held: ExitStack) -> Path:
    with convert_write_errors(job.folder):
        return folders.create_partial(job.folder, job.record.step, held)


def _write_pieces(job: SaveJob, temporary: Path) -> dict[str, Any] | None:
    """Write this process's pieces, if there are any, and return the fields of its `ShardFile`."""
    if not job.pieces:
        return None
    with convert_write_errors(job.folder):
        return write_shard(temporary / shard_name(job.process), job.pieces)


def _publish(job: SaveJob, temporary: Path, files: list[ShardFile]) -> Path:
    fields = job.record.fields | {"files": [file.__dict__ for file in files]}
    with convert_write_errors(job.folder):
        check_visible(temporary, files)
        return folders.publish(
            temporary,
            f"step-{job.record.step:08d}",
            lambda number: fields | {"number": number},
            job.keep,
        )
