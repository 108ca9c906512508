"""Namespaces: skips of the same name in different namespaces are different skips."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field


@dataclass(frozen=True, order=True, slots=True)
class Namespace:
    """A namespace of skips, equal to its copies only.

    >>> Namespace() == Namespace()
    False
    """

    id: uuid.UUID = field(default_factory=uuid.uuid4)
