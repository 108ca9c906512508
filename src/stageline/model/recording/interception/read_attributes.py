"""Find the numbers and texts in a module's attributes that its code may go by.

A tape has them as constants. If one is another when a batch arrives, another tape is recorded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from types import CodeType
from typing import Any

from torch import nn

from stageline.model import trees

TRAINING = "training"


def plain_attributes(modules: Iterable[nn.Module]) -> tuple[Any, ...]:
    """Return the plain attributes of modules that are named in the code of their classes.

    An attribute that only a training loop counts up is not among them.
    """
    found: list[Any] = []
    for module in modules:
        kind: Any = type(module)
        names = _names(kind)
        found += [
            value
            for key, value in vars(module).items()
            if key in names and (value is None or isinstance(value, trees.PLAIN))
        ]
    return tuple(found)


@cache
def _names(kind: Any) -> frozenset[str]:
    """Return the names and texts in the code of a class, without what all modules have."""
    own = kind.__mro__[: kind.__mro__.index(nn.Module)]
    members = (member for cls in own for member in vars(cls).values())
    return frozenset({TRAINING, *(name for member in members for name in _in_member(member))})


def _in_member(member: Any) -> Iterator[str]:
    while True:
        inner = getattr(member, "__wrapped__", None) or getattr(member, "__func__", None)
        code = getattr(member, "__code__", None)
        if isinstance(member, property):
            inner = member.fget
        if isinstance(code, CodeType):
            yield from _in_code(code)
        if inner is None:
            return
        member = inner


def _in_code(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, CodeType):
            yield from _in_code(constant)
