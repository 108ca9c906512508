"""Find the name that each tensor of a model has in files, which may differ by a prefix.

    file     layers.0.weight         model.layers.0.weight    module.0.weight
    model    model.layers.0.weight   layers.0.weight          0.weight
             "model." is added       "model." is removed      "module." is removed

A file of a base model has no prefix, that of the model with a head has one. A prefix is used only
if the names fit with it, and with no other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple


class FileNameChange(NamedTuple):
    """A prefix that the names in the files lack, or one that they have in addition."""

    added: str = ""
    removed: str = ""

    def apply(self, name: str) -> str:
        return self.added + name.removeprefix(self.removed)


class NameMatch(NamedTuple):
    """The names of the model's tensors in the files."""

    # For each tensor its names in the files by its names in the model; a tensor may have several.
    stored: tuple[Mapping[str, str], ...]
    unknown: tuple[str, ...]  # names in the files that the model does not have

    @property
    def num_missing(self) -> int:
        return sum(not names for names in self.stored)

    @property
    def quality(self) -> int:
        """Return 2 if all names fit, 1 if all of the model or all of the files do, or else 0."""
        is_empty = self.num_missing == len(self.stored)
        return 0 if is_empty else (not self.num_missing) + (not self.unknown)


def match_names(
    tensors: Sequence[tuple[str, ...]],
    found: Iterable[str],
    is_ignored: Callable[[str], bool] = lambda _: False,
) -> NameMatch:
    """Match the names `found` in files with `tensors`, which has all names of each tensor.

    A name in the files that is no tensor's and `is_ignored` is not reported as unknown.

    >>> match_names([("model.a.bias",), ("model.b.bias", "head.bias")], ["a.bias", "b.bias"])
    NameMatch(stored=({'model.a.bias': 'a.bias'}, {'model.b.bias': 'b.bias'}), unknown=())
    """
    files = list(found)
    plain = _match(tensors, files, is_ignored, FileNameChange())
    assert plain is not None  # names in the files differ from each other
    if plain.quality == 2:
        return plain
    others: list[NameMatch] = []
    for renaming in _renamings(tensors, files, plain):
        match = _match(tensors, files, is_ignored, renaming)
        if match is not None and match not in others:
            others.append(match)
    for quality in (2, 1):
        fitting = [match for match in others if match.quality >= quality]
        if plain.quality >= quality or len(fitting) > 1:
            return plain
        if fitting:
            return fitting[0]
    return plain


def _match(
    tensors: Sequence[tuple[str, ...]],
    files: Sequence[str],
    is_ignored: Callable[[str], bool],
    renaming: FileNameChange,
) -> NameMatch | None:
    """Return the match after a renaming; None if it gives two tensors of the files one name."""
    known = {name for names in tensors for name in names}
    stored: dict[str, str] = {}
    unknown = []
    for name in files:
        renamed = name if name in known else renaming.apply(name)
        if renamed in stored:
            return None
        if renamed in known:
            stored[renamed] = name
        elif not is_ignored(renamed):
            unknown.append(name)
    by_tensor = ({n: stored[n] for n in names if n in stored} for names in tensors)
    return NameMatch(tuple(by_tensor), tuple(unknown))


def _renamings(
    tensors: Sequence[tuple[str, ...]], files: Sequence[str], plain: NameMatch
) -> Iterator[FileNameChange]:
    """Yield the renamings that may fit: with them no name is unknown, or none is missing.

    So they fit the longest unknown name, or the longest missing one; there are few of these.
    """
    known = {name for names in tensors for name in names}
    unknown = max(plain.unknown, key=len, default="")
    missing = [
        name
        for names, stored in zip(tensors, plain.stored, strict=True)
        for name in names
        if not stored
    ]
    lacking = max(missing, key=len, default="")
    if unknown:
        yield from (FileNameChange(added=prefix) for prefix in _prefixes_before(unknown, known))
        yield from (FileNameChange(removed=prefix) for prefix in _prefixes_of(unknown, known))
    if lacking:
        yield from (FileNameChange(added=prefix) for prefix in _prefixes_of(lacking, set(files)))
        yield from (FileNameChange(removed=prefix) for prefix in _prefixes_before(lacking, files))


def _prefixes_before(name: str, names: Iterable[str]) -> list[str]:
    """Return what stands before `name` in those of the `names` that end with it."""
    return sorted(other.removesuffix(name) for other in names if other.endswith(f".{name}"))


def _prefixes_of(name: str, names: set[str]) -> list[str]:
    """Return the prefixes of `name` without which it is one of the `names`."""
    parts = name.split(".")
    cuts = (".".join(parts[:length]) + "." for length in range(1, len(parts)))
    return [prefix for prefix in cuts if name.removeprefix(prefix) in names]
