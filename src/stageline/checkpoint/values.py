"""Python values as JSON that come back as they were, also where JSON has no word for them.

(1, 2)        {"()": [1, 2]}
{3: "x"}      {"{}": [[3, "x"]]}    keys that are not text, such as MultiStepLR's milestones
"""

from __future__ import annotations

import json
from typing import Any

from stageline.errors import CheckpointError

TUPLE, PAIRS = "()", "{}"
DEPTH = 100  # of lists in lists: JSON and Python both give up at about 1000


def encode(name: str, value: object) -> Any:
    """Return `value` in the types of JSON; raise `CheckpointError` if it has others."""
    try:
        encoded = _encode(value, DEPTH)
        json.dumps(encoded)  # integers of thousands of digits cannot be written
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"{name} cannot be saved: {error}; it has to be numbers, text, None, and lists, tuples "
            "and dicts of them"
        ) from None
    return encoded


def decode(value: Any) -> Any:
    """Return what `encode` was given.

    >>> decode(encode("data", {"a": (1, [2.5]), "b": {3: None}}))
    {'a': (1, [2.5]), 'b': {3: None}}
    """
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {TUPLE} and isinstance(value[TUPLE], list):
        return tuple(decode(item) for item in value[TUPLE])
    if value.keys() == {PAIRS} and isinstance(value[PAIRS], list):
        return {decode(key): decode(item) for key, item in value[PAIRS]}
    return {key: decode(item) for key, item in value.items()}


def _encode(value: object, depth: int) -> Any:
    if depth == 0:
        raise ValueError(f"it is nested more than {DEPTH} deep")
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
