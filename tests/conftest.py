from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

# In CI the same examples every time: a rare one is a find for whoever runs the tests by hand, not a
# reason to refuse somebody else's change.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that start processes mostly wait: of three workers two have them, half of them each.

    Each worker begins with the tests of its third of the list.
    """
    waiting = [item for item in items if "distributed" in item.path.parts]
    others = [item for item in items if "distributed" not in item.path.parts]
    third = max(0, len(items) // 3 - len(waiting[::2]))
    items[:] = waiting[::2] + others[:third] + waiting[1::2] + others[third:]


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """It interrupts, also where the tests were started in the background and it would not."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
