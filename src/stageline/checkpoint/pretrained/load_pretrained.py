"""sl.load_pretrained: copy weights from files of another program into a pipeline.

    find files ─► names ─► match ─► shapes, headers of own files ─► all ranks agree ─► copy

Nothing is changed before the last step.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from stageline.arguments import check_type
from stageline.checkpoint.compatibility import listed
from stageline.checkpoint.group import checkpoint_group
from stageline.checkpoint.load import check_not_copied, check_writable
from stageline.checkpoint.pipeline_state import optimizers_of
from stageline.checkpoint.pretrained.match_names import NameMatch, match_names
from stageline.checkpoint.pretrained.shared_names import SharedTensor, shared_tensors, user_models
from stageline.checkpoint.pretrained.weight_files import (
    AnyPath,
    WeightFiles,
    find_weights,
    unusable,
)
from stageline.checkpoint.read_tensors import StoredPiece, StoredTensor, TensorReader, checksum
from stageline.errors import CheckpointError
from stageline.pipeline import Pipeline, session_of

IGNORED_PATTERNS = "_keys_to_ignore_on_load_unexpected"  # an attribute of models of transformers


class UnmatchedNames(NamedTuple):
    """The names that `load_pretrained(…, strict=False)` did not load."""

    missing: tuple[str, ...]  # in the model, but not in the files
    unexpected: tuple[str, ...]  # in the files, but not in the model


@dataclass(frozen=True)
class PreparedWeights:
    """The tensors of this process, and what will be copied into them."""

    path: str
    reader: TensorReader
    targets: Mapping[str, Tensor]  # by their names in the files
    unmatched: UnmatchedNames


def load_pretrained(
    pipe: Pipeline, path: AnyPath | Sequence[AnyPath], *, strict: bool = True
) -> UnmatchedNames:
    """Copy weights from safetensors files into the model's parameters and persistent buffers.

    `path` is a folder as `save_pretrained` of transformers, `huggingface_hub` or `sl.export` write
    it, one file, or a list of files. All ranks call it; each reads its own tensors only. Names are
    those of the model, or differ from them by one prefix. Values are converted to the model's
    dtypes.

    Names that the files lack or have in addition raise `CheckpointError`. With `strict=False` they
    are returned instead, and tensors that the files lack keep their values. If anything is wrong,
    all ranks raise and nothing is changed. States of optimizers are not changed.
    """
    group = checkpoint_group(pipe)
    group.finish_save()
    files, checksum = group.run(lambda: _find(pipe, path, strict))
    checksums = group.gather(checksum)
    group.run(lambda: _check_same_files(files, checksums))
    prepared = group.run(lambda: _prepare(pipe, files, strict=strict))
    group.run(lambda: _apply(prepared))
    return prepared.unmatched


def _find(
    pipe: Pipeline, path: AnyPath | Sequence[AnyPath], strict: object
) -> tuple[WeightFiles, str]:
    check_type("strict", strict, bool, "write True or False", CheckpointError)
    optimizers_of(pipe, None)  # raises while a stream is in progress
    files = find_weights(path)
    return files, str(files.checksum())


def _check_same_files(files: WeightFiles, checksums: Sequence[str]) -> None:
    if any(each != checksums[0] for each in checksums):
        raise CheckpointError(
            f"{files.path!r} is not the same on all ranks: load the same files on all of them"
        )


def _prepare(pipe: Pipeline, files: WeightFiles, *, strict: bool) -> PreparedWeights:
    tensors = shared_tensors(pipe)
    match = match_names([each.names for each in tensors], files.file_of, _ignored_names(pipe))
    missing = [each for each, names in zip(tensors, match.stored, strict=True) if not names]
    unmatched = UnmatchedNames(tuple(each.names[0] for each in missing), match.unknown)
    _check_names(files, match, unmatched, strict=strict)
    _check_initialized(pipe, files, [each for each in missing if each.is_here])
    pairs = zip(tensors, match.stored, strict=True)
    here = [(each, list(names.values())) for each, names in pairs if names and each.is_here]
    stored = files.stored(name for _, names in here for name in names)
    if strict:
        _check_copies_equal(files, stored, here)
    targets = {names[0]: each.tensor for each, names in here}
    _check_shapes(files, stored, {names[0]: each for each, names in here})
    for name, tensor in targets.items():
        check_writable(name, tensor)
    check_not_copied(pipe)
    reader = TensorReader(stored)
    reader.verify(targets)
    return PreparedWeights(files.path, reader, targets, unmatched)


def _ignored_names(pipe: Pipeline) -> Callable[[str], bool]:
    """Return which names of files are ignored although the model cannot load them.

    Older files have buffers that are no longer persistent, such as `layers.0.rotary.inv_freq`, as
    one in each layer even if the model now has a single one. Models of transformers list others.
    """
    buffers = {
        _last_parts(layer.full_name(name))
        for layer in pipe.layers
        for name in {n for n, _ in layer.module.named_buffers()} - layer.module.state_dict().keys()
    }
    given = (getattr(model, IGNORED_PATTERNS, None) or () for model in user_models(pipe))
    patterns = [re.compile(pattern) for each in given for pattern in each]

    def is_ignored(name: str) -> bool:
        return _last_parts(name) in buffers or any(each.search(name) for each in patterns)

    return is_ignored


def _last_parts(name: str) -> str:
    return ".".join(name.split(".")[-2:])


def _check_names(
    files: WeightFiles, match: NameMatch, unmatched: UnmatchedNames, *, strict: bool
) -> None:
    if match.stored and match.num_missing == len(match.stored):
        raise CheckpointError(
            f"{files.path!r} has {listed(sorted(files.file_of)) or 'no tensors'}, but the model "
            f"has {listed(list(unmatched.missing))}, and no single prefix makes up for that: "
            "build the model that was saved"
        )
    parts = [f"lacks {listed(list(unmatched.missing))}"] * bool(unmatched.missing)
    parts += [f"has the additional {listed(list(unmatched.unexpected))}"] * bool(match.unknown)
    if strict and parts:
        raise CheckpointError(
            f"{files.path!r} {' and '.join(parts)}, but the names must be those of the model: "
            "build the model that was saved, or use strict=False to load the names that fit"
        )


def _check_initialized(pipe: Pipeline, files: WeightFiles, missing: Sequence[SharedTensor]) -> None:
    """Raise if a tensor that the files lack has no value that it could keep."""
    kept = {id(each.tensor): each.names[0] for each in missing}
    blanks = [(id(getattr(b.module, b.name)), b) for b in session_of(pipe).blanks]
    names = [kept[key] for key, blank in blanks if key in kept and not blank.is_initialized]
    if names:
        raise CheckpointError(
            f"{files.path!r} lacks {listed(names)}, which was on the meta device and is not "
            "initialized: initialize it in Pipeline's init_fn=, or load files that have it"
        )


def _check_copies_equal(
    files: WeightFiles,
    stored: Mapping[str, StoredTensor],
    tensors: Sequence[tuple[SharedTensor, Sequence[str]]],
) -> None:
    """Raise if the files have different values for the names of one tensor."""
    for _, names in tensors:
        if len(names) > 1:
            pieces = [stored[name].pieces[0] for name in names]
            if len({(piece.type, _checksum(piece)) for piece in pieces}) > 1:
                raise CheckpointError(
                    f"{files.path!r} has different values for {listed(list(names))}, but in the "
                    "model they are one tensor: build a model that does not share it, or use "
                    f"strict=False to load {names[0]}"
                )


def _checksum(piece: StoredPiece) -> int:
    try:
        return checksum(piece)
    except OSError as error:
        raise unusable(piece.path, error) from error


def _check_shapes(
    files: WeightFiles,
    stored: Mapping[str, StoredTensor],
    tensors: Mapping[str, SharedTensor],
) -> None:
    differing = [
        f"{name} is {stored[name].type.shape} instead of {tuple(each.tensor.shape)}"
        for name, each in tensors.items()
        if stored[name].type.shape != tuple(each.tensor.shape)
    ]
    if differing:
        raise CheckpointError(
            f"{files.path!r} does not match the model: {listed(differing)}: build the model that "
            "was saved"
        )


def _apply(prepared: PreparedWeights) -> None:
    try:
        with torch.no_grad():
            prepared.reader.copy(prepared.targets)
    except (CheckpointError, OSError) as error:
        raise CheckpointError(
            f"{prepared.path!r} was checked, but then could not be read: {error}; the pipeline "
            "now has some old and some new values: load again"
        ) from error
