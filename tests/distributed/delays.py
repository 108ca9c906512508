"""Random delays on the channels of simulated devices, to find what depends on timing."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from time import sleep
from unittest import mock

from stageline.runtime.backends.processes.channels.ordered_channel import OrderedChannel

LONGEST = 0.004  # seconds; an action of the tests' models takes about one millisecond


@contextmanager
def delays(seed: int) -> Iterator[None]:
    """Delay about half of the operations on all channels of this process.

    How long depends on the seed, the channel and the operation's number. So the two ends of a
    channel, and the channels of a rank, are late at different times.
    """

    def pause(channel: OrderedChannel, number: int) -> None:
        chance = random.Random(f"{seed} {channel.name} {channel.peer} {number}")
        if chance.random() < 0.5:
            sleep(LONGEST * chance.random())

    with mock.patch.object(OrderedChannel, "pause", pause):
        yield
