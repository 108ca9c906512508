"""The record of a checkpoint: the fields of checkpoint.json, everything that is not a tensor."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from stageline.checkpoint.write_tensors import ShardFile, Size
from stageline.errors import CheckpointError

Seed = Annotated[int, Field(strict=True, ge=-(2**63), lt=2**64)]
STRICT = ConfigDict(extra="forbid")


@dataclass(frozen=True, config=STRICT)
class GroupOptions:
    """The options of a parameter group, and the names of its parameters."""

    kind: str  # the optimizer's class
    values: dict[str, Any]  # by `to_json`
    names: tuple[str, ...]


@dataclass(frozen=True, config=STRICT)
class SchedulerState:
    """The state of the pipeline's own schedulers, which is the same on all ranks."""

    kind: str  # the scheduler's class
    state: dict[str, Any]  # by `to_json`


@dataclass(frozen=True, config=STRICT)
class Record:
    """The fields of a checkpoint.json, validated when the record is made."""

    number: Size  # counts the checkpoints of a folder in the order in which they were saved
    step: Size
    data: Any  # by `to_json`
    num_steps: Size
    seed: Seed
    files: tuple[ShardFile, ...]
    groups: tuple[GroupOptions, ...]  # empty: no optimizer was saved
    # optimizer state that is not a tensor, by parameter name
    values: dict[str, dict[str, bool | int | float | str | None]]
    scheduler: SchedulerState | None

    @staticmethod
    def of(fields: Mapping[str, Any]) -> Record:
        """Return a record with these fields; raise ValueError for the first that is invalid."""
        try:
            return _RECORD.validate_python(dict(fields))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            name = ".".join(map(str, first["loc"]))
            raise ValueError(f"its field {name} is invalid: {first['msg'].lower()}") from None

    @property
    def fields(self) -> dict[str, Any]:
        return asdict(self)


_RECORD = TypeAdapter(Record)


def merge_groups(groups: Sequence[GroupOptions]) -> tuple[GroupOptions, ...]:
    """Join the groups of all ranks: those with equal options become one."""
    names: dict[str, list[str]] = {}
    first: dict[str, GroupOptions] = {}
    for group in groups:
        key = json.dumps([group.kind, group.values])
        names.setdefault(key, []).extend(group.names)
        first.setdefault(key, group)
    return tuple(
        replace(first[key], names=tuple(dict.fromkeys(members)))
        for key, members in names.items()
        if members
    )


def common_scheduler_state(states: Sequence[SchedulerState | None]) -> SchedulerState | None:
    """Return the state that all schedulers have; raise if they differ."""
    found = [state for state in states if state is not None]
    for state in found:
        if state != found[0]:
            raise CheckpointError(
                f"the schedulers of two stages, {found[0].kind} and {state.kind}, have different "
                "states, but a checkpoint stores one for all stages, so that it can be loaded with "
                "another partition: use the same optimizer and scheduler on all stages"
            )
    return found[0] if found else None
