"""Do something in every process; if it raises in one of them, it raises in all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from stageline.errors import PlanError
from stageline.runtime.backends.backend import Collectives, Group

T = TypeVar("T")


def everywhere(collectives: Collectives, act: Callable[[], T], what: str = "a plan") -> list[T]:
    """Return what `act` returns in each process, those of replicas too."""
    try:
        own = act()
    except Exception as error:
        failed: tuple[T | None, str] = (None, str(error) or type(error).__name__)
        collectives.gather(failed, what, Group.EVERYONE)
        raise
    found = collectives.gather((own, ""), what, Group.EVERYONE)
    for number, (_, text) in enumerate(found):
        if text:
            raise PlanError(f"rank {number}: {text}")
    return [each for each, _ in found]
