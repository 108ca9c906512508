"""What the watch says of ranks that do not take part, without any other process."""

from __future__ import annotations

from time import monotonic

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # it is in its docs

from stageline.runtime.backends.processes.failure_watch import FailureWatch, Wait
from stageline.runtime.backends.processes.heartbeats import Heartbeat

WHAT = "the losses"


def overdue(absent: list[int], num_ranks: int = 4, limit: float = 5.0) -> str | None:
    """Return what rank 0 says after a wait of twice the limit, if all others are alive."""
    names = [f"rank {rank}" for rank in range(num_ranks)]
    watch = FailureWatch(HashStore(), names, 0, limit, lambda: None)
    for rank in range(1, num_ranks):
        waits = () if rank in absent else (WHAT,)
        watch.heartbeats[rank] = Heartbeat(waits=waits)
        watch.last_alive[rank] = monotonic()
    begun = monotonic() - 2 * limit
    return watch._overdue_text(Wait(WHAT, None, begun, begun))


@pytest.mark.parametrize(
    ("absent", "said"),
    [([2], "rank 2 has not taken part"), ([1, 3], "rank 1, rank 3 have not taken part")],
)
def test_ranks_that_do_not_take_part_are_named(absent: list[int], said: str) -> None:
    text = overdue(absent)
    assert text is not None
    assert said in text
    assert f"rank 0 has waited 10 s for all ranks to share {WHAT}" in text
