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


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """It interrupts, also where the tests were started in the background and it would not."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
