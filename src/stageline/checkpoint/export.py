"""sl.export: the model alone, in one file for everyone else."""

from __future__ import annotations

import os
import shutil
from itertools import chain, groupby
from operator import attrgetter
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from stageline.checkpoint.contents import places
from stageline.checkpoint.desk import Desk, desk_of
from stageline.checkpoint.storage import check_all_there, join, plain, refusal, write
from stageline.pipeline import Pipeline


def export(path: str | os.PathLike[str], pipe: Pipeline) -> None:
    """Write parameters and buffers to one safetensors file; all ranks call it.

    The plain model takes it with `load_state_dict(safetensors.torch.load_file(path))`: every name
    is there, so a weight that several layers share is there several times.
    """
    desk = desk_of(pipe)
    desk.settle()
    found = desk.agreed(lambda: list(places(pipe)))
    layers = [[p.own_name for p in run] for _, run in groupby(found, attrgetter("layer"))]
    own = {p.own_name: p.tensor for p in found if pipe.peers.has(p.rank)}
    tensors = plain(own if pipe.peers.replica == 0 else {})
    final = Path(path)
    temporary = desk.by_first(lambda: _begin(final))
    try:
        if desk.group is not None:
            with desk.together("an export"):
                write(desk, temporary, tensors)
        desk.by_first(lambda: _complete(desk, temporary, final, layers, tensors))
    finally:
        if desk.is_first:
            shutil.rmtree(temporary, ignore_errors=True)


def _begin(path: Path) -> Path:
    temporary = path.with_name(f"{path.name}.partial")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
    except OSError as error:
        raise refusal(path, error) from error
    return temporary


def _complete(
    desk: Desk, temporary: Path, final: Path, layers: list[list[str]], tensors: dict[str, Tensor]
) -> Path:
    whole = temporary / "whole"
    try:
        if desk.group is None:
            save_file(tensors, whole, metadata={"format": "pt"})
        else:
            check_all_there(temporary, chain(*layers))
            join(temporary, layers, whole)
        return whole.rename(final)
    except OSError as error:
        raise refusal(final, error) from error
