"""sl.save: a checkpoint that is complete or not there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from stageline.arguments import check_size
from stageline.checkpoint import folder as folders
from stageline.checkpoint.contents import Record, json_value, merged, optimizers_of, part_of
from stageline.checkpoint.desk import Desk, Saving, desk_of
from stageline.checkpoint.storage import check_all_there, plain, refusal, write
from stageline.errors import CheckpointError
from stageline.pipeline import Pipeline


class Job(NamedTuple):
    """What is to be written beside the tensors, and where."""

    folder: Path
    record: Record
    names: frozenset[str]  # of the tensors of all ranks
    keep: int


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

    `data` is a JSON value of your own, such as where the data loader stands. The last `keep`
    checkpoints stay, older ones are deleted. With `wait=False` the state is copied, and written
    while training goes on: `wait()` of what is returned raises what went wrong. Of a pipeline
    with optimizers of its own, these are saved.
    """
    check_size("keep", keep)
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise CheckpointError(f"step is {step!r}, but has to be a whole number from 0 up")
    desk = desk_of(pipe)
    desk.settle()
    part, data = desk.agreed(
        lambda: (part_of(pipe, optimizers_of(pipe, optimizer)), json_value("data", data))
    )
    tensors = plain(part.tensors, copy=not wait)
    parts = desk.everywhere((list(tensors), part.groups, part.values, part.scheduler))
    names = frozenset(name for names, *_ in parts for name in names)
    record = Record(
        step=step,
        data=data,
        num_steps=pipe.num_steps,
        seed=pipe.seed,
        num_tensors=len(names),
        groups=merged([group for _, groups, _, _ in parts for group in groups]),
        values={name: value for _, _, values, _ in parts for name, value in values.items()},
        scheduler=next((state for *_, state in parts if state is not None), None),
    )
    job = Job(Path(folder), record, names, keep)
    saving = desk.save(lambda own: _write(own, job, tensors), in_background=not wait)
    if wait:
        saving.wait()
    return saving


def _write(desk: Desk, job: Job, tensors: dict[str, Tensor]) -> Path:
    temporary = desk.by_first(lambda: _begin(job))
    try:
        write(desk, temporary, tensors)
        return desk.by_first(lambda: _complete(job, temporary))
    except BaseException:
        if desk.is_first:
            folders.abandon(temporary)
        raise


def _begin(job: Job) -> Path:
    with _told(job.folder):
        return folders.begin(job.folder, job.record.step)


def _complete(job: Job, temporary: Path) -> Path:
    with _told(job.folder):
        check_all_there(temporary, job.names)
        return folders.complete(temporary, job.record.to_json, job.keep)


@contextmanager
def _told(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise refusal(folder, error) from error
