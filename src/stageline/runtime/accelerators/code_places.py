"""Which line of code does something on a device, and whether that line is Stageline's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple, TypeVar, cast

import torch

PACKAGE = Path(__file__).parents[2]
RUNTIME = str(PACKAGE / "runtime")
NOT_NAMED = (str(Path(__file__).parent), str(Path(torch.__file__).parent), "<")
OPTIMIZERS = str(Path(torch.__file__).parent / "optim")  # the user's choice, as layers are

PASSING_ON = ("call", "__torch_function__", "__torch_dispatch__")  # methods of interceptors
USER_CODE: set[CodeType] = set()

F = TypeVar("F", bound=Callable[..., Any])
Line = tuple[CodeType, int]


class Place(NamedTuple):
    """What uses memory: an operator, the line that called it, and what the rank did."""

    what: str
    line: Line | None
    action: object | None  # or the number of a mini-batch, and an action

    def __str__(self) -> str:
        code, number = self.line or (None, 0)
        where = f" at {code.co_filename.removeprefix(f'{PACKAGE}/')}:{number}" if code else ""
        if self.action is None:
            return f"{self.what}{where}"
        parts = self.action if isinstance(self.action, tuple) else (self.action,)
        return f"{self.what}{where} during {' of mini-batch '.join(map(str, reversed(parts)))}"


def calling_code() -> Line | None:
    """Return the innermost line of code outside torch and the simulation."""
    frame = inspect.currentframe()
    while frame is not None and _is_skipped(frame.f_code):
        frame = frame.f_back
    return None if frame is None else (frame.f_code, frame.f_lineno)


def runs_user_code(function: F) -> F:
    """Mark a function that runs a layer, a loss or the like: what it does is user code."""
    USER_CODE.add(cast("FunctionType", function).__code__)
    return function


def is_own() -> bool:
    """Return whether the innermost line is of the runtime: not of layers, losses or optimizers."""
    for code, _ in _lines():
        if code in USER_CODE or code.co_filename.startswith(OPTIMIZERS):
            return False
        if not (_is_skipped(code) or code.co_name in PASSING_ON):
            return code.co_filename.startswith(RUNTIME)
    return False


def _lines() -> Iterator[Line]:
    frame = inspect.currentframe()
    while frame is not None:
        yield frame.f_code, frame.f_lineno
        frame = frame.f_back


@cache
def _is_skipped(code: CodeType) -> bool:
    return code.co_filename.startswith(NOT_NAMED)
