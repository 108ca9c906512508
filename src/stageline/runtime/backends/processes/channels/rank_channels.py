"""All channels of a rank, opened when a program first needs them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from weakref import WeakSet

from stageline.errors import StageError
from stageline.runtime.accelerators.accelerator import Accelerator
from stageline.runtime.backends.processes.channels.device_messages import (
    DeviceIncoming,
    DeviceOutgoing,
)
from stageline.runtime.backends.processes.channels.open_channels import (
    OpenedChannel,
    Pair,
    open_channels,
    pairs_of,
)
from stageline.runtime.backends.processes.connection import Connection
from stageline.runtime.backends.processes.groups import CONNECT
from stageline.runtime.backends.processes.messages.gloo_messages import Incoming
from stageline.runtime.backends.processes.messages.message_parts import RankLost
from stageline.runtime.engine.loop import Loop


class RankChannels:
    """The channels of this rank. State: the pairs of ranks that have theirs, and for which loops.

    Two ranks have one if both are accelerators of the same kind.
    """

    def __init__(
        self,
        connection: Connection,
        accelerators: Sequence[Accelerator | None],
        own: Accelerator,
        host: Incoming,
        *,
        fixed_forms: bool,
    ) -> None:
        self.connection, self.own = connection, own
        self.kinds = [None if each is None else each.device.type for each in accelerators]
        self.pairs: set[Pair] = set()
        self.loops: WeakSet[Loop] = WeakSet()
        limit = connection.limit
        self.outgoing = DeviceOutgoing(own, connection.outgoing, limit, fixed_forms=fixed_forms)
        self.incoming = DeviceIncoming(own, host, limit, fixed_forms=fixed_forms)

    def connect(self, loop: Loop) -> None:
        """Open the channels of a loop that are not open yet; all processes call this."""
        if loop in self.loops:
            return
        self.loops.add(loop)
        pairs = pairs_of(loop.values_of_message, loop.period.routes.rank_of)
        missing = [pair for pair in pairs if self._has_channel(pair) and pair not in self.pairs]
        connection, watch = self.connection, self.connection.watch
        connect = timedelta(seconds=max(connection.limit, CONNECT))
        arguments = missing, connection.groups.lines, self.own, connect, self._opened
        try:
            watch.call("connections", lambda: open_channels(*arguments))
        except StageError as failure:
            raise connection.failed(str(failure)) from None
        except (OSError, RuntimeError, RankLost) as error:
            cause = watch.cause_of(f"{watch.name} could not connect to it for its messages")
            raise connection.failed(f"{cause}\n  {error}") from None
        self.pairs.update(missing)

    def _has_channel(self, pair: Pair) -> bool:
        source, target = (self.kinds[rank] for rank in pair)
        return source is not None and source == target

    def _opened(self, pair: Pair, opened: OpenedChannel) -> None:
        connection, (source, target) = self.connection, pair
        connection.groups.opened.append(opened.group)
        connection.channels.append(opened.lane.channel)
        if source == connection.rank:
            self.outgoing.lanes[target] = opened.lane
        else:
            self.incoming.lanes[source] = opened.lane
