"""Convert Python values to JSON and back without losing tuples and keys that are not strings.

(1, 2)        {"()": [1, 2]}
{3: "x"}      {"{}": [[3, "x"]]}    for instance the milestones of MultiStepLR
"""

from __future__ import annotations

import json
from typing import Any

from stageline.errors import CheckpointError

TUPLE, PAIRS = "()", "{}"
MAX_DEPTH = 100  # of nested containers: both JSON and Python fail at about 1000


def to_json(name: str, value: object) -> Any:
    """Convert `value` to JSON types; raise `CheckpointError` if that is not possible."""
    try:
        encoded = _encode(value, MAX_DEPTH)
        json.dumps(encoded)  # fails for integers of thousands of digits
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"{name} cannot be saved: {error}; it may contain only numbers, strings, None, lists, "
            "tuples and dicts"
        ) from None
    return encoded


def from_json(value: Any) -> Any:
    """Return the value that `to_json` was given.

    >>> from_json(to_json("data", {"a": (1, [2.5]), "b": {3: None}}))
    {'a': (1, [2.5]), 'b': {3: None}}
    """
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {TUPLE} and isinstance(value[TUPLE], list):
        return tuple(from_json(item) for item in value[TUPLE])
    if value.keys() == {PAIRS} and isinstance(value[PAIRS], list):
        return {from_json(key): from_json(item) for key, item in value[PAIRS]}
    return {key: from_json(item) for key, item in value.items()}


def _encode(value: object, depth: int) -> Any:
    if depth == 0:
        raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep")
    if isinstance(value, bool | int | float | str | None):
        return value
    if isinstance(value, list):
        return [_encode(item, depth - 1) for item in value]
    if isinstance(value, tuple):
        return {TUPLE: [_encode(item, depth - 1) for item in value]}
    if not isinstance(value, dict):
        raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")
    if all(isinstance(key, str) for key in value) and value.keys() not in ({TUPLE}, {PAIRS}):
        return {key: _encode(item, depth - 1) for key, item in value.items()}
    return {PAIRS: [[_encode(k, depth - 1), _encode(v, depth - 1)] for k, v in value.items()]}
