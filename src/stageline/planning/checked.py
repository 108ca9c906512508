"""Values that come from outside, from files or Python: what is wrong with them, in words."""

from __future__ import annotations

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

MOST_SHOWN = 100  # characters of a place in a file


def not_truth(value: object) -> object:
    """True and False are not numbers, though they could be made into some."""
    if isinstance(value, bool):
        raise ValueError("input should be a number")
    return value


def _number(value: object) -> object:
    """Nor is text."""
    if isinstance(value, str | bytes):
        raise ValueError("input should be a number")
    return not_truth(value)


def _amount(value: float) -> float:
    """Sums and quotients of amounts stay finite."""
    if value and not LEAST_AMOUNT <= value <= MOST_AMOUNT:
        raise ValueError(f"input should be 0, or from {LEAST_AMOUNT:g} to {MOST_AMOUNT:g}")
    return value


Number = Annotated[float, BeforeValidator(_number)]
Whole = Annotated[int, BeforeValidator(_number)]
Amount = Annotated[
    float, BeforeValidator(_number), Field(ge=0, allow_inf_nan=False), AfterValidator(_amount)
]
Count = Annotated[int, BeforeValidator(_number), Field(ge=1, le=MOST_COUNT)]
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
            ours = _ours(error)
            raise ours or PlanError(f"{kind.__name__} {_first_fault(error, names)}") from None

    made.__init__ = __init__
    return made  # type: ignore[no-any-return]  # it is the same class


def read_json(path: AnyPath, kind: type[T], most: int = MOST_FILE_BYTES) -> T:
    """A file from outside; raises `PlanError` with the first thing that is wrong with it."""
    text = read_text(path, PlanError, most)
    try:
        return TypeAdapter(kind).validate_json(text)
    except ValidationError as error:
        ours = _ours(error)
        fault = f"has a fault: {ours}" if ours else _first_fault(error)
        raise PlanError(f"{os.fspath(path)!r} {fault}") from None


def write_json(path: AnyPath, value: object) -> None:
    """Write a value that `read_json` reads."""
    write_bytes(path, TypeAdapter(type(value)).dump_json(value, indent=1), PlanError)


def _ours(error: ValidationError) -> StagelineError | None:
    """Return what a `__post_init__` raised, if it was that."""
    raised = error.errors(include_url=False)[0].get("ctx", {}).get("error")
    return raised if isinstance(raised, StagelineError) else None


def _first_fault(error: ValidationError, names: list[str] | None = None) -> str:
    """`names` are those of arguments that were given by their place."""
    first = error.errors(include_url=False)[0]
    place = list(first["loc"])
    if names and place and isinstance(place[0], int) and place[0] < len(names):
        place[0] = names[place[0]]
    found = "" if first["type"] == "missing" else f" (it is {shown(first['input'])})"
    where = ".".join(map(str, place)) or "it"
    message = first["msg"].lower().removeprefix("value error, ")
    return f"has a fault at {where[:MOST_SHOWN]}: {message}{found}"
