"""Divide the tensors of a model into files, and put these into a folder for `from_pretrained`.

    config.json, generation_config.json                if the model has them
    model.safetensors                                  if it fits in one file, or else
    model-00001-of-00002.safetensors, …, model.safetensors.index.json

transformers (5.23) reads `model.safetensors` if it is there, or else the files that the index
names. It ties weights again, to whichever of their names it finds.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from stageline.arguments import shown
from stageline.checkpoint.group import has_rank
from stageline.checkpoint.pipeline_state import model_tensors
from stageline.checkpoint.pretrained.config_files import write_config_files
from stageline.checkpoint.pretrained.shared_names import shared_tensors
from stageline.checkpoint.pretrained.weight_files import MODEL_FILE, MODEL_INDEX, SUFFIX
from stageline.checkpoint.write_tensors import TensorType
from stageline.errors import CheckpointError
from stageline.pipeline import Pipeline
from stageline.units import parse_bytes

SHARD = re.compile(r"model-\d{5,}-of-\d{5,}\.safetensors")


class ExportTensor(NamedTuple):
    """A tensor under the name that it is exported with."""

    name: str
    tensor: Tensor
    layer: str
    is_here: bool  # a layer of this process has it


class ExportFile(NamedTuple):
    """A file of an export."""

    name: str
    names_by_layer: list[list[str]]  # of its tensors; those of a layer are in memory at a time
    num_bytes: int  # of its tensors


def parse_shard_size(size: object) -> float:
    """Return `max_shard_size` in bytes."""
    try:
        found = parse_bytes(size) if isinstance(size, str) else size
    except ValueError as error:
        raise CheckpointError(f"max_shard_size is wrong: {error}") from error
    if isinstance(found, bool) or not isinstance(found, int | float) or not found >= 1:
        raise CheckpointError(
            f"max_shard_size is {shown(size)}, but has to be a number of bytes, or text such as "
            "'5GB'"
        )
    return found


def tensors_under_all_names(pipe: Pipeline) -> list[ExportTensor]:
    """Return the tensors of the model; one that several layers share has several names."""
    return [
        ExportTensor(each.own_name, each.tensor, each.layer, has_rank(pipe, each.rank))
        for each in model_tensors(pipe)
    ]


def tensors_once(pipe: Pipeline) -> list[ExportTensor]:
    """Return the tensors of the model under their first names in the model's `state_dict`."""
    order = {name: number for number, name in enumerate(pipe.model.state_dict())}
    return [
        ExportTensor(
            min(each.names, key=lambda name: order.get(name, len(order))),
            each.tensor,
            each.layer,
            each.is_here,
        )
        for each in shared_tensors(pipe)
    ]


def one_file(tensors: Sequence[ExportTensor], name: str) -> list[ExportFile]:
    """Return a file with all tensors."""
    by_layer = groupby(tensors, attrgetter("layer"))
    names = [[each.name for each in layer] for _, layer in by_layer]
    return [ExportFile(name, names, sum(map(_num_bytes, tensors)))]


def several_files(tensors: Sequence[ExportTensor], most: float) -> list[ExportFile]:
    """Divide the tensors, in their order, into files of at most `most` bytes if possible."""
    groups: list[list[ExportTensor]] = [[]]
    size = 0
    for each in tensors:
        if groups[-1] and size + _num_bytes(each) > most:
            groups.append([])
            size = 0
        groups[-1].append(each)
        size += _num_bytes(each)
    names = [f"model-{n:05d}-of-{len(groups):05d}{SUFFIX}" for n in range(1, len(groups) + 1)]
    names = names if len(groups) > 1 else [MODEL_FILE]
    return [file for n, g in zip(names, groups, strict=True) for file in one_file(g, n)]


def publish_folder(folder: Path, ready: Path, pipe: Pipeline, files: Sequence[ExportFile]) -> None:
    """Move the files in `ready` to the folder; what is read first comes last.

    So weights of two exports are never mixed: after a crash in between, the folder has those of
    one of them, or, if both have files of the same names, none.
    """
    write_config_files(pipe, ready)
    names = [file.name for file in files]
    configs = sorted(path.name for path in ready.iterdir() if path.name not in names)
    is_single = names == [MODEL_FILE]
    if not is_single:
        (ready / MODEL_INDEX).write_text(_index_text(files), encoding="utf-8")
        if any(os.path.lexists(folder / name) for name in names):
            (folder / MODEL_INDEX).unlink(missing_ok=True)
    for name in [*configs, *names, *([] if is_single else [MODEL_INDEX])]:
        (ready / name).replace(folder / name)
    (folder / (MODEL_INDEX if is_single else MODEL_FILE)).unlink(missing_ok=True)
    for path in _earlier_shards(folder):
        if path.name not in names:
            path.unlink()


def _earlier_shards(folder: Path) -> Iterable[Path]:
    return [path for path in sorted(folder.iterdir()) if SHARD.fullmatch(path.name)]


def _index_text(files: Sequence[ExportFile]) -> str:
    places = {name: file.name for file in files for names in file.names_by_layer for name in names}
    fields = {
        "metadata": {"total_size": sum(file.num_bytes for file in files)},
        "weight_map": dict(sorted(places.items())),
    }
    return json.dumps(fields, indent=2) + "\n"


def _num_bytes(each: ExportTensor) -> int:
    return TensorType.of(each.tensor).num_bytes
