"""sl.export: write the model alone to one safetensors file."""

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
from stageline.checkpoint.group import checkpoint_group, has_rank, is_first_replica
from stageline.checkpoint.pipeline_state import model_tensors
from stageline.checkpoint.read_tensors import join_shards, stored_tensors
from stageline.checkpoint.save import assign_pieces
from stageline.checkpoint.write_tensors import (
    Piece,
    ShardFile,
    check_visible,
    convert_write_errors,
    local_pieces,
    shard_name,
    write_shard,
)
from stageline.pipeline import Pipeline


def export(path: str | os.PathLike[str], pipe: Pipeline) -> None:
    """Write parameters and buffers to one safetensors file; all ranks call it.

    Load it into the plain model with `load_state_dict(safetensors.torch.load_file(path))`. The file
    has every name, so a weight that several layers share is stored several times.
    """
    group = checkpoint_group(pipe)
    group.finish_save()
    tensors = group.run(lambda: list(model_tensors(pipe)))
    by_layer = groupby(tensors, attrgetter("layer"))
    names_by_layer = [[each.own_name for each in layer] for _, layer in by_layer]
    own = {each.own_name: each.tensor for each in tensors if has_rank(pipe, each.rank)}
    pieces = group.run(lambda: local_pieces(own if is_first_replica(pipe) else {}))
    process, own_pieces, everyone = assign_pieces(group, pieces, {})
    final, is_alone = Path(path), len(everyone) == 1
    with ExitStack() as held:
        temporary = Path(group.run_on_first(lambda: str(_create(final, held))))
        if group.is_first:
            held.callback(shutil.rmtree, temporary, ignore_errors=True)
        shard = temporary / shard_name(process)
        written = group.run(lambda: _write(final, shard, own_pieces, is_alone))
        files = [ShardFile(**fields) for fields in group.gather(written) if fields]
        names = None if is_alone else names_by_layer
        group.run_on_first(lambda: str(_publish(final, temporary, names, files)))


def _create(path: Path, held: ExitStack) -> Path:
    with convert_write_errors(path):
        folders.delete_leftovers(path.parent, path.name)
        return folders.claim_partial(path.parent, path.name, held)


def _write(
    final: Path, shard: Path, pieces: Mapping[str, Piece], is_alone: bool
) -> dict[str, Any] | None:
    with convert_write_errors(final):
        return write_shard(shard, pieces, is_plain=is_alone) if pieces or is_alone else None


def _publish(
    final: Path, temporary: Path, names: list[list[str]] | None, files: list[ShardFile]
) -> Path:
    """Join the files, if there are several, by the `names` of each layer; rename the result."""
    with convert_write_errors(final):
        whole = temporary / files[0].name
        if names is not None:
            check_visible(temporary, files)
            whole = temporary / "whole.safetensors"
            join_shards(stored_tensors(temporary, files), names, whole)
        return whole.replace(final)
