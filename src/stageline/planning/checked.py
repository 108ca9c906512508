"""Values that come from outside, from files or Python: what is wrong with them, in words."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, TypeVar, dataclass_transform

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from stageline.errors import PlanError

Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def checked(kind: type[T]) -> type[T]:
    """A frozen dataclass that checks the types and limits of its fields when it is made.

    >>> @checked
    ... class Pair:
    ...     left: Amount
    ...     right: Amount = 0.0
    >>> Pair(-1.0)
    Traceback (most recent call last):
    stageline.errors.PlanError: Pair has a fault at left: ... than or equal to 0 (it is -1.0)
    """
    made: Any = dataclass(frozen=True, config=ConfigDict(extra="forbid"))(kind)
    validate: Callable[..., None] = made.__init__
    names = [field.name for field in fields(made)]

    def __init__(self: T, *args: object, **kwargs: object) -> None:  # noqa: N807
        try:
            validate(self, *args, **kwargs)
        except ValidationError as error:
            ours = error.errors()[0].get("ctx", {}).get("error")  # raised by a __post_init__
            refused = f"{kind.__name__} {_first_fault(error, names)}"
            raise (ours if isinstance(ours, PlanError) else PlanError(refused)) from None

    made.__init__ = __init__
    return made  # type: ignore[no-any-return]  # it is the same class


def read_json(path: str | os.PathLike[str], kind: type[T]) -> T:
    """A file from outside; raises `PlanError` with the first thing that is wrong with it."""
    try:
        return TypeAdapter(kind).validate_json(Path(path).read_bytes())
    except OSError as error:
        raise PlanError(f"{os.fspath(path)!r} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        raise PlanError(f"{os.fspath(path)!r} {_first_fault(error)}") from None


def write_json(path: str | os.PathLike[str], value: object) -> None:
    Path(path).write_bytes(TypeAdapter(type(value)).dump_json(value, indent=1))


def _first_fault(error: ValidationError, names: list[str] | None = None) -> str:
    """`names` are those of arguments that were given by their place."""
    first = error.errors(include_url=False)[0]
    place = list(first["loc"])
    if names and place and isinstance(place[0], int) and place[0] < len(names):
        place[0] = names[place[0]]
    found = "" if first["type"] == "missing" else f" (it is {first['input']!r})"
    return f"has a fault at {'.'.join(map(str, place)) or 'it'}: {first['msg'].lower()}{found}"
