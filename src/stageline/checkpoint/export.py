"""sl.export: write the model alone, to one safetensors file or to a folder for `from_pretrained`.

    each process ─► path.partial/shard-00001.safetensors ─► joined by layer ─► renamed

A single process writes the files as they will be.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from stageline.checkpoint import folder as folders
from stageline.checkpoint.group import checkpoint_group, is_written_here
from stageline.checkpoint.pretrained.export_folder import (
    ExportFile,
    ExportTensor,
    one_file,
    parse_shard_size,
    publish_folder,
    several_files,
    tensors_once,
    tensors_under_all_names,
)
from stageline.checkpoint.pretrained.weight_files import SUFFIX
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
from stageline.errors import CheckpointError
from stageline.files import checked_path
from stageline.pipeline import Pipeline

READY = "ready"  # where files have their final names, in the temporary folder


def export(
    path: str | os.PathLike[str], pipe: Pipeline, *, max_shard_size: int | str = "5GB"
) -> None:
    """Write parameters and persistent buffers without Stageline's own state; all ranks call it.

    A path that ends with `.safetensors` is one file. Load it into the plain model with
    `load_state_dict(safetensors.torch.load_file(path))`. The file has every name, so a weight that
    several layers share is stored several times.

    Any other path is a folder for `from_pretrained` of transformers and for `sl.load_pretrained`:
    `model.safetensors`, or several files of at most `max_shard_size` bytes with an index, and the
    configuration if the model has one. A shared weight is stored once, under its first name in the
    model's `state_dict`. Other files in the folder are kept, earlier weights are replaced.
    """
    group = checkpoint_group(pipe)
    group.finish_save()
    final = group.run(lambda: checked_path(path, CheckpointError))
    shard_size = group.run(lambda: parse_shard_size(max_shard_size))
    is_folder = group.run_on_first(lambda: _is_folder(final))
    tensors = group.run(lambda: tensors_once(pipe) if is_folder else tensors_under_all_names(pipe))
    files = several_files(tensors, shard_size) if is_folder else one_file(tensors, final.name)
    pieces = group.run(lambda: _own_pieces(pipe, tensors))
    process, own_pieces, everyone = assign_pieces(group, pieces, {})
    is_alone = len(everyone) == 1
    with ExitStack() as held:
        temporary = Path(group.run_on_first(lambda: str(_create(final, is_folder, held))))
        ready = temporary / READY
        if is_alone:
            group.run(lambda: _write_files(final, ready, own_pieces, files))
        else:
            shard = temporary / shard_name(process)
            written = group.run(lambda: _write_shard(final, shard, own_pieces))
            shards = [ShardFile(**fields) for fields in group.gather(written) if fields]
            group.run(lambda: _join(final, ready, shards, files) if group.is_first else None)
        group.run(lambda: _publish(final, ready, pipe, files) if group.is_first else None)


def _is_folder(path: Path) -> bool:
    with convert_write_errors(path):
        is_folder = path.is_dir() or path.suffix != SUFFIX
        if is_folder and path.exists() and not path.is_dir():
            raise CheckpointError(
                f"{str(path)!r} is a file, but a path without {SUFFIX!r} is written as a folder: "
                f"add {SUFFIX!r}, or give another path"
            )
        return is_folder


def _own_pieces(pipe: Pipeline, tensors: Sequence[ExportTensor]) -> dict[str, Piece]:
    here = (each for each in tensors if each.is_here)
    return local_pieces({t.name: t.tensor for t in here if is_written_here(pipe, t.tensor)})


def _create(path: Path, is_folder: bool, held: ExitStack) -> Path:
    """Make a temporary folder, in the first process only; it is deleted when `held` closes."""
    with convert_write_errors(path):
        if is_folder and not path.exists():
            path.mkdir(parents=True)
            held.callback(_delete_if_empty, path)
        parent, name = (path, "model") if is_folder else (path.parent, path.name)
        folders.delete_leftovers(parent, name)
        temporary = folders.claim_partial(parent, name, held)
        held.callback(shutil.rmtree, temporary, ignore_errors=True)
        (temporary / READY).mkdir()
        return temporary


def _delete_if_empty(folder: Path) -> None:
    if not any(folder.iterdir()):
        folder.rmdir()


def _write_files(
    final: Path, ready: Path, pieces: Mapping[str, Piece], files: Sequence[ExportFile]
) -> None:
    with convert_write_errors(final):
        for file in files:
            own = {name: pieces[name] for names in file.names_by_layer for name in names}
            write_shard(ready / file.name, own, is_plain=True)


def _write_shard(final: Path, shard: Path, pieces: Mapping[str, Piece]) -> dict[str, Any] | None:
    with convert_write_errors(final):
        return write_shard(shard, pieces) if pieces else None


def _join(
    final: Path, ready: Path, shards: Sequence[ShardFile], files: Sequence[ExportFile]
) -> None:
    with convert_write_errors(final):
        check_visible(ready.parent, shards)
        stored = stored_tensors(ready.parent, shards)
        for file in files:
            names = [name for layer in file.names_by_layer for name in layer]
            own = {name: stored[name] for name in names}
            join_shards(own, file.names_by_layer, ready / file.name)


def _publish(final: Path, ready: Path, pipe: Pipeline, files: Sequence[ExportFile]) -> None:
    with convert_write_errors(final):
        if final.is_dir():
            publish_folder(final, ready, pipe, files)
        else:
            (ready / files[0].name).replace(final)
