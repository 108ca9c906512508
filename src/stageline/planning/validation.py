"""Frozen dataclasses that validate their fields, and how they are read from and written to JSON."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import fields
from typing import Annotated, Any, TypeVar, dataclass_transform

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
)
from pydantic.dataclasses import dataclass

from stageline.arguments import shown
from stageline.errors import PlanError, StagelineError
from stageline.files import AnyPath, read_text, write_bytes
from stageline.limits import LEAST_AMOUNT, MOST_AMOUNT, MOST_COUNT, MOST_FILE_BYTES

MAX_FIELD_PATH_LENGTH = 100  # characters of a field's path in an error message


def reject_bool(value: object) -> object:
    """Raise `ValueError` for True and False, which pydantic would convert to numbers."""
    if isinstance(value, bool):
        raise ValueError("input should be a number")
    return value


def _reject_text(value: object) -> object:
    """Raise `ValueError` for text and booleans, which pydantic would convert to numbers."""
    if isinstance(value, str | bytes):
        raise ValueError("input should be a number")
    return reject_bool(value)


def _check_magnitude(value: float) -> float:
    """Raise `ValueError` if sums and quotients of such amounts could overflow."""
    if value and not LEAST_AMOUNT <= value <= MOST_AMOUNT:
        raise ValueError(f"input should be 0, or from {LEAST_AMOUNT:g} to {MOST_AMOUNT:g}")
    return value


Number = Annotated[float, BeforeValidator(_reject_text)]
WholeNumber = Annotated[int, BeforeValidator(_reject_text)]
Amount = Annotated[
    float,
    BeforeValidator(_reject_text),
    Field(ge=0, allow_inf_nan=False),
    AfterValidator(_check_magnitude),
]
Difference = Annotated[  # of two amounts
    float,
    BeforeValidator(_reject_text),
    Field(allow_inf_nan=False),
    AfterValidator(lambda value: math.copysign(_check_magnitude(abs(value)), value)),
]
Count = Annotated[int, BeforeValidator(_reject_text), Field(ge=1, le=MOST_COUNT)]
T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def validated(cls: type[T]) -> type[T]:
    """Make a class a frozen dataclass that raises `PlanError` for values of a wrong type or size.

    >>> @validated
    ... class Pair:
    ...     left: Amount
    ...     right: Amount = 0.0
    >>> Pair(-1.0)
    Traceback (most recent call last):
    stageline.errors.PlanError: Pair has an invalid left: ... than or equal to 0 (got -1.0)
    """
    made: Any = dataclass(frozen=True, config=ConfigDict(extra="forbid"))(cls)
    validate: Callable[..., None] = made.__init__
    names = [field.name for field in fields(made)]

    def __init__(self: T, *args: object, **kwargs: object) -> None:  # noqa: N807
        try:
            validate(self, *args, **kwargs)
        except ValidationError as error:
            raised = _raised_by_post_init(error)
            raise raised or PlanError(f"{cls.__name__} {_first_problem(error, names)}") from None

    made.__init__ = __init__
    return made  # type: ignore[no-any-return]  # it is the same class


def read_json(path: AnyPath, cls: type[T], max_bytes: int = MOST_FILE_BYTES) -> T:
    """Read a validated value from a file; raise `PlanError` naming the first problem in it."""
    return parse_json(read_text(path, PlanError, max_bytes), cls, repr(os.fspath(path)))


def parse_json(text: str, cls: type[T], name: str) -> T:
    """Return the validated value in a text; `name` says in errors what the text is."""
    try:
        return TypeAdapter(cls).validate_json(text)
    except ValidationError as error:
        raised = _raised_by_post_init(error)
        problem = f"is invalid: {raised}" if raised else _first_problem(error)
        raise PlanError(f"{name} {problem}") from None


def write_json(path: AnyPath, value: object) -> None:
    """Write a validated value to a file that `read_json` can read."""
    write_bytes(path, TypeAdapter(type(value)).dump_json(value, indent=1), PlanError)


def _raised_by_post_init(error: ValidationError) -> StagelineError | None:
    """Return the error that a `__post_init__` raised, or None if pydantic found the problem."""
    raised = error.errors(include_url=False)[0].get("ctx", {}).get("error")
    return raised if isinstance(raised, StagelineError) else None


def _first_problem(error: ValidationError, names: list[str] | None = None) -> str:
    """Describe the first problem; `names` are the fields, to name positional arguments."""
    first = error.errors(include_url=False)[0]
    path = list(first["loc"])
    if names and path and isinstance(path[0], int) and path[0] < len(names):
        path[0] = names[path[0]]
    got = "" if first["type"] == "missing" else f" (got {shown(first['input'])})"
    where = ".".join(map(str, path)) or "value"
    message = first["msg"].lower().removeprefix("value error, ")
    return f"has an invalid {where[:MAX_FIELD_PATH_LENGTH]}: {message}{got}"
