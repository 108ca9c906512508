"""Arguments of the wrong type or size, told at the door and not three rooms further on."""

from __future__ import annotations

import math
from typing import cast

from stageline.errors import ModelError, ScheduleError, StagelineError


def check_size(name: str, size: object) -> None:
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ScheduleError(f"{name} is {size!r}, but has to be a whole number from 1 up")


def check_seconds(name: str, seconds: object) -> None:
    is_number = not isinstance(seconds, bool) and isinstance(seconds, int | float)
    if not is_number or not 0 < cast("float", seconds) < math.inf:
        raise ScheduleError(f"{name} is {seconds!r}, but has to be a number of seconds above 0")


def check_type(
    name: str,
    value: object,
    types: type | tuple[type, ...],
    hint: str,
    error: type[StagelineError] = ScheduleError,
) -> None:
    if not isinstance(value, types):
        kinds = types if isinstance(types, tuple) else (types,)
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise error(f"{name} is {_short(value)}, but has to be a {wanted}: {hint}")


def check_function(name: str, function: object) -> None:
    if not callable(function):
        raise ModelError(f"{name} is {_short(function)}, but has to be a function")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"a {type(value).__name__}"
