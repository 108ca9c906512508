"""Check the types and sizes of arguments, so that a wrong one is an error where it is passed."""

from __future__ import annotations

import math
import types
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache, wraps
from typing import (
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from stageline.errors import ModelError, ScheduleError, StagelineError

SHORT = 60  # the most characters of a value that an error shows
MOST_ITEMS = 30  # the most items of a collection that an error shows
F = TypeVar("F", bound=Callable[..., Any])


def check_size(
    name: str, size: object, least: int = 1, error: type[StagelineError] = ScheduleError
) -> None:
    """Raise unless a value is an integer of at least `least`."""
    if isinstance(size, bool) or not isinstance(size, int) or size < least:
        raise error(f"{name} is {shown(size)}, but has to be a whole number from {least} up")


def check_seconds(name: str, seconds: object) -> None:
    """Raise unless a value is a finite number above 0."""
    is_number = not isinstance(seconds, bool) and isinstance(seconds, int | float)
    if not is_number or not 0 < cast("float", seconds) < math.inf:
        raise ScheduleError(
            f"{name} is {shown(seconds)}, but has to be a number of seconds above 0"
        )


def check_type(
    name: str,
    value: object,
    types: type | tuple[type, ...],
    hint: str,
    error: type[StagelineError] = ScheduleError,
) -> None:
    """Raise unless a value has one of these types; `hint` tells the user how to get one."""
    if not isinstance(value, types):
        kinds = types if isinstance(types, tuple) else (types,)
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise error(f"{name} is {shown(value)}, but has to be a {wanted}: {hint}")


def check_function(name: str, function: object) -> None:
    """Raise unless a value can be called."""
    if not callable(function):
        raise ModelError(f"{name} is {shown(function)}, but has to be a function")
    if isinstance(function, type) and hasattr(function, "forward"):  # a module such as nn.MSELoss
        raise ModelError(
            f"{name} is the class {function.__name__}, but has to be a function: give an object "
            f"of it, {function.__name__}()"
        )


def check_arguments(
    function: Callable[..., Any],
    given: Mapping[str, object],
    error: type[StagelineError] = ScheduleError,
) -> None:
    """Raise if an argument is not of the type that the function's own annotations name.

    Public functions call it first, with their `locals()`. A subclass is accepted, an int is
    accepted as a float, and True is not a number. The items of collections are checked too.

    >>> def draw(sizes: Sequence[int], name: str = "") -> None:
    ...     check_arguments(draw, locals())
    >>> draw([1, "two"])
    Traceback (most recent call last):
    stageline.errors.ScheduleError: sizes is [1, 'two'], but has to be a list of whole numbers
    """
    for name, hint in _hints(function).items():
        if name in given and not _fits(given[name], hint):
            raise error(f"{name} is {shown(given[name])}, but has to be {_described(hint)}")


def renamed_argument(**new_names: str) -> Callable[[F], F]:
    """Let a function accept old names of its keyword arguments, with a `DeprecationWarning`.

    >>> @renamed_argument(sample="example_inputs")
    ... def profile(model: str, example_inputs: int) -> int:
    ...     return example_inputs
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     profile("gpt", sample=3)
    3
    >>> print(caught[0].message)
    the argument 'sample' of profile() is deprecated: use 'example_inputs'
    """

    def decorate(function: F) -> F:
        name = function.__qualname__.removesuffix(".__init__")

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for old, new in new_names.items():
                if old not in kwargs:
                    continue
                if new in kwargs:
                    raise TypeError(f"{name}() got {old!r} and {new!r}, its new name: omit {old!r}")
                message = f"the argument {old!r} of {name}() is deprecated: use {new!r}"
                warnings.warn(message, DeprecationWarning, stacklevel=2)
                kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return cast("F", call)

    return decorate


class RenamedAttribute:
    """An old name of an attribute or method, which works with a `DeprecationWarning`.

    >>> class Schedule:
    ...     home = RenamedAttribute("rank_of")
    ...     rank_of = 3
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     Schedule().home
    3
    >>> print(caught[0].message)
    Schedule.home is deprecated: use rank_of
    """

    def __init__(self, new: str) -> None:
        self.new = new

    def __set_name__(self, owner: type, name: str) -> None:
        self.old = f"{owner.__name__}.{name}"

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self
        message = f"{self.old} is deprecated: use {self.new}"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return getattr(instance, self.new)


def shown(value: object) -> str:
    """Return a value as errors show it: by type and size if its repr is long or raises.

    >>> shown("1f1b"), shown([0] * 1000), shown(10**5000)
    ("'1f1b'", 'a list of 1000', 'a number of 5001 digits')
    """
    if isinstance(value, int) and value.bit_length() > 200:
        return f"a number of {int(value.bit_length() * math.log10(2)) + 1} digits"
    if isinstance(value, Collection) and not isinstance(value, str | bytes):
        try:
            count = len(value)
        except Exception:  # a user's own class may raise anything
            return f"a {type(value).__name__}"
        if count > MOST_ITEMS:
            return f"a {type(value).__name__} of {count}"
    if isinstance(value, str | bytes) and len(value) > SHORT:
        return f"{value[: SHORT // 2]!r} and {len(value) - SHORT // 2} more characters"
    try:
        text = repr(value)
    except Exception:  # as above
        text = ""
    return text if 0 < len(text) <= SHORT else f"a {type(value).__name__}"


@cache
def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the type of each parameter; nothing if one is imported only for type checkers."""
    try:
        found = get_type_hints(function)
    except NameError:
        return {}
    return {name: hint for name, hint in found.items() if name != "return"}


def _fits(value: object, hint: Any) -> bool:
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _fits(value, parts[0])
    if origin is Union or origin is types.UnionType:
        return any(_fits(value, part) for part in parts)
    if origin is Literal:
        return value in parts
    if origin is tuple and Ellipsis not in parts:
        is_tuple = isinstance(value, tuple) and len(value) == len(parts)
        return is_tuple and all(map(_fits, cast("tuple[object, ...]", value), parts))
    if origin is not None:
        return _is_filled(value, origin, parts)
    if hint is None or hint is type(None):
        return value is None
    if not isinstance(hint, type):
        return True  # Any, and type variables
    if isinstance(value, bool):
        return hint in (bool, object)
    return isinstance(value, (int, float) if hint is float else hint)


def _is_filled(value: object, origin: type, parts: tuple[Any, ...]) -> bool:
    """Return whether a value is a function or a collection of such items; iterators pass."""
    if not isinstance(value, origin) or isinstance(value, str | bytes):
        return False
    if isinstance(value, Mapping):
        return all(_fits(k, parts[0]) and _fits(v, parts[1]) for k, v in value.items())
    if isinstance(value, Sequence | set | frozenset):
        return all(_fits(item, parts[0]) for item in value)
    return True


WORDS = {int: "a whole number", float: "a number", str: "text", bool: "True or False"}
MANY = {int: "whole numbers", float: "numbers", str: "texts", bool: "True or False"}


def _described(hint: Any) -> str:
    """Describe the values that an annotation accepts."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _described(parts[0])
    if origin is Union or origin is types.UnionType:
        some = [part for part in parts if part is not type(None)]
        return " or ".join(dict.fromkeys(map(_described, some)))
    if origin is Literal:
        return " or ".join(map(repr, parts))
    if hint is None or hint is type(None):
        return "None"
    if origin is not None and issubclass(origin, Mapping):
        return "a dict"
    if origin is not None and issubclass(origin, Iterable):
        kind = "tuple" if origin is tuple else "list"
        item = parts[0] if parts else Any
        return f"a {kind} of {MANY.get(item) or getattr(item, '__name__', 'items')}"
    if origin is not None:
        return "a function"
    name = str(getattr(hint, "__name__", hint))
    return WORDS.get(hint) or f"{'an' if name[:1] in 'AEIOU' else 'a'} {name}"
