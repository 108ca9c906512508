"""The processes of the process group that this one is in."""

from __future__ import annotations

import os

from torch import distributed

from stageline.errors import ModelError


def process_rank() -> int:
    """Return the rank of this process in the process group, or 0 if there is none."""
    return distributed.get_rank() if distributed.is_initialized() else 0


def num_processes() -> int:
    """Return the size of the process group, or 1 if there is none."""
    return distributed.get_world_size() if distributed.is_initialized() else 1


def check_group() -> None:
    """Raise if a launcher has started several processes that are no process group."""
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched > 1 and not distributed.is_initialized():
        raise ModelError(
            f"a launcher has started {launched} processes, but there is no process group, so each "
            "would train the whole model: call torch.distributed.init_process_group() before you "
            "make the pipeline"
        )
