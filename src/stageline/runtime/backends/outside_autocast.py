"""Run the actions of a stream outside of the caller's autocast, which only forwards enter again.

Torch wants backwards outside: in autocast, the backward of a layer that disables it for itself
would compute in the lower type. Ranks in threads have none, but others run in the caller's thread.
"""

from __future__ import annotations

from stageline.runtime.backends.backend import Running
from stageline.runtime.engine.minibatch import MiniBatch
from stageline.runtime.exactness.caller_context import outside_autocast


class RunningOutsideAutocast:
    """A stream on its way."""

    def __init__(self, running: Running) -> None:
        self.running = running

    def feed(self, minibatch: MiniBatch) -> None:
        with outside_autocast():
            self.running.feed(minibatch)

    def wait(self, position: int) -> None:
        with outside_autocast():
            self.running.wait(position)

    def drain(self) -> None:
        with outside_autocast():
            self.running.drain()
