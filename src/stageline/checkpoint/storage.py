"""Tensors in the safetensors files of a folder, one for each process, through torch's own DCP.

A header says what a file holds, so nothing in it is ever executed. Tensors that several processes
hold together, DTensors, are written in parts and read as the reader has them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import save as to_bytes
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

# The public `save` and `load` warn whenever there is no process group. Only a filter silences that,
# and filters belong to all threads.
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict

from stageline.checkpoint.desk import Desk
from stageline.errors import CheckpointError
from stageline.runtime.peers import local


class Form(NamedTuple):
    """What a tensor looks like."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor) -> Form:
        return Form(tuple(tensor.shape), tensor.dtype)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {self.shape}"

    def empty(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype)

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


def plain(tensors: Mapping[str, Tensor], *, copy: bool = False) -> dict[str, Tensor]:
    """As files take them: on the CPU, contiguous, no two in the same memory."""
    found: dict[str, Tensor] = {}
    taken: set[int] = set()
    for name, tensor in tensors.items():
        here = tensor.detach()
        if not hasattr(here, "to_local"):  # parts of a whole are moved when they are written
            here = here.to("cpu").contiguous()
        memory = local(here).untyped_storage().data_ptr()
        if memory in taken or (copy and memory == local(tensor).untyped_storage().data_ptr()):
            here = here.clone()
        taken.add(local(here).untyped_storage().data_ptr())
        found[name] = here
    return found


def write(desk: Desk, folder: Path, tensors: dict[str, Tensor]) -> None:
    """All ranks call it, each with its own; whichever fails, all are told."""
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        _save_state_dict(tensors, writer, process_group=desk.group, no_dist=desk.group is None)
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        where = "" if desk.group is None else f"rank {rank}: "
        raise refusal(folder.parent, cause, where) from cause


def forms(folder: Path) -> dict[str, Form]:
    """What is there, from headers alone."""
    try:
        found = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{str(folder)!r} cannot be read: {error}; a file is cut short, or is not of sl.save: "
            "load another checkpoint by its path"
        ) from error
    return {
        name: Form(tuple(stored.size), stored.properties.dtype)
        for name, stored in found.items()
        if isinstance(stored, TensorStorageMetadata)
    }


def read(folder: Path, targets: dict[str, Tensor]) -> None:
    """Into these tensors; every rank for itself."""
    try:
        _load_state_dict(targets, HuggingFaceStorageReader(str(folder)), no_dist=True)
    except CheckpointException as error:
        cause = error.failures[0][0]
        raise CheckpointError(
            f"{str(folder)!r} could not be read to its end: {type(cause).__name__}: {cause}; the "
            "pipeline is part old, part new: load again"
        ) from cause


def check_all_there(folder: Path, names: Iterable[str]) -> None:
    if missing := sorted({*names} - forms(folder).keys()):
        raise CheckpointError(
            f"{str(folder)!r} has no {missing[0]} where the first process looks, but another one "
            "wrote it: write to a folder that all processes share"
        )


def join(folder: Path, names: Iterable[Iterable[str]], path: Path) -> None:
    """All tensors of a folder in one file. They are in memory one run of `names` at a time.

    Large elements come first, so that all of them are aligned.
    """
    found = forms(folder)
    header: dict[str, dict[str, object]] = {}
    starts: dict[str, int] = {}
    end = 0
    for name in sorted(found, key=lambda name: (-found[name].dtype.itemsize, name)):
        starts[name], end = end, end + found[name].num_bytes
        header[name] = {
            "dtype": _code(found[name].dtype),
            "shape": found[name].shape,
            "data_offsets": (starts[name], end),
        }
    text = json.dumps({"__metadata__": {"format": "pt"}} | header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for run in names:
            tensors = {name: found[name].empty() for name in run}
            read(folder, dict(tensors))
            for name, tensor in tensors.items():
                file.seek(8 + len(text) + starts[name])
                file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)


def refusal(folder: Path, cause: BaseException, where: str = "") -> CheckpointError:
    return CheckpointError(
        f"{where}{str(folder)!r} could not be written to: {type(cause).__name__}: {cause}; what "
        "was there before is as it was: make room, or write elsewhere"
    )


def _code(dtype: torch.dtype) -> str:
    """As the format spells it; its own writer knows."""
    sample = to_bytes({"x": torch.empty(0, dtype=dtype)})
    length = int.from_bytes(sample[:8], "little")
    code: str = json.loads(sample[8 : 8 + length])["x"]["dtype"]
    return code
