from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from hypothesis import settings
from tests.distributed.fork_servers import fork_servers

# In CI the same examples every time: a rare one is a find for whoever runs the tests by hand, not a
# reason to refuse somebody else's change.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")


def pytest_configure(config: pytest.Config) -> None:
    """Let tests fork ranks; the processes of xdist use the servers of the one that starts them."""
    if not hasattr(config, "workerinput"):
        servers = ExitStack()
        servers.enter_context(fork_servers())
        config.add_cleanup(servers.close)


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """It interrupts, also where the tests were started in the background and it would not."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
