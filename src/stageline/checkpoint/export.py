"""sl.export: the model alone, in one file for everyone else."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

from stageline.checkpoint import folder as folders
from stageline.checkpoint.contents import places
from stageline.checkpoint.desk import desk_of
from stageline.checkpoint.reading import join, saved_in
from stageline.checkpoint.save import divided, told
from stageline.checkpoint.storage import File, Piece, check_all_there, pieces_of, write
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
    pieces = desk.agreed(lambda: pieces_of(own if pipe.peers.replica == 0 else {}))
    process, mine, everyone = divided(desk, pieces, {})
    final = Path(path)
    with ExitStack() as held:
        temporary = Path(desk.by_first(lambda: str(_begin(final, held))))
        if desk.is_first:
            held.callback(shutil.rmtree, temporary, ignore_errors=True)
        shard = temporary / f"shard-{process + 1:05d}.safetensors"
        is_alone = len(everyone) == 1
        written = desk.agreed(lambda: _write(final, shard, mine, is_alone))
        files = [File(**fields) for fields in desk.everywhere(written) if fields]
        desk.by_first(lambda: str(_complete(final, temporary, None if is_alone else layers, files)))


def _begin(path: Path, held: ExitStack) -> Path:
    with told(path):
        folders.clear(path.parent, path.name)
        return folders.claim(path.parent, path.name, held)


def _write(
    final: Path, shard: Path, pieces: Mapping[str, Piece], is_alone: bool
) -> dict[str, Any] | None:
    with told(final):
        return write(shard, pieces, is_plain=is_alone) if pieces or is_alone else None


def _complete(
    final: Path, temporary: Path, layers: list[list[str]] | None, files: list[File]
) -> Path:
    """Join the files by `layers`, if there are several, and give the result its name."""
    with told(final):
        whole = temporary / files[0].name
        if layers is not None:
            check_all_there(temporary, files)
            whole = temporary / "whole.safetensors"
            join(saved_in(temporary, files), layers, whole)
        return whole.replace(final)
