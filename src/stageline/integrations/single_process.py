"""Let a framework take this process for the only one, in a process group that a pipeline has."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from accelerate import PartialState

from stageline.errors import ModelError
from stageline.integrations.processes import check_group, process_rank

SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", *SIZES)


@contextmanager
def single_process() -> Iterator[None]:
    """Hide what a launcher has set from what is made in the block.

    accelerate, and with it transformers, then neither wraps models in DistributedDataParallel nor
    divides batches between processes. Only the first process is the main one and writes files.
    """
    check_group()
    names = [name for name in LAUNCHER_VARIABLES if name in os.environ]
    hidden = {name: os.environ.pop(name) for name in names}
    try:
        yield
        _check_alone()
        PartialState().process_index = process_rank()
        PartialState().local_process_index = int(hidden.get("LOCAL_RANK", process_rank()))
    finally:
        os.environ.update(hidden)


def _check_alone() -> None:
    found = PartialState().num_processes
    if found > 1:
        raise ModelError(
            f"accelerate counts {found} processes as copies of the whole model, but the pipeline "
            "has them as its ranks: make no other Accelerator or TrainingArguments before this one"
        )
