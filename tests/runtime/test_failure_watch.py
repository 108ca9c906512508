"""What the watch says of ranks that do not take part, without any other process."""

from __future__ import annotations

from datetime import timedelta
from threading import Event, Thread, Timer
from time import monotonic

import pytest
import torch
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]  # it is in its docs

from stageline.errors import StageError
from stageline.runtime.backends.processes import groups
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


def test_a_watch_has_started_when_others_can_see_its_own_heartbeat() -> None:
    """Otherwise a rank could go on to what blocks its store, and others would miss it for good."""
    watch = FailureWatch(HashStore(), ["rank 0", "rank 1"], 0, 5.0, lambda: None)
    watch.store.write_heartbeat(1, Heartbeat())
    written, write = Event(), watch._write_heartbeat

    def write_later() -> None:
        written.wait()
        write()

    watch._write_heartbeat = write_later  # type: ignore[method-assign]
    start = Thread(target=watch.start, daemon=True)
    start.start()
    start.join(0.2)
    assert start.is_alive()
    written.set()
    start.join(20.0)
    assert not start.is_alive()
    assert watch.store.has_heartbeat(0)
    watch.leave()


def test_heartbeats_go_on_while_the_users_store_waits_for_a_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True)
    monkeypatch.setattr(groups, "default_store", lambda: store)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    waiting = Thread(target=store.wait, args=(["made"], timedelta(seconds=60)), daemon=True)
    own = groups._store_for([0])
    waiting.start()
    written = Thread(target=own.set, args=("heartbeat", "1"), daemon=True)
    written.start()
    written.join(20.0)
    assert not written.is_alive()
    store.clone().set("made", "1")  # type: ignore[attr-defined]  # torch's stub lacks it
    waiting.join(20.0)
    assert not waiting.is_alive()


def test_a_call_that_cannot_be_cancelled_is_abandoned_when_a_rank_fails() -> None:
    watch = FailureWatch(HashStore(), ["rank 0", "rank 1"], 0, 5.0, lambda: None)
    watch.store.write_heartbeat(1, Heartbeat())
    watch.start()
    assert watch.call("connections", lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        watch.call("connections", lambda: 1 // 0)
    watch.store.report_failure("rank 1 failed in layer 'x'")
    with pytest.raises(StageError, match="rank 1 failed in layer 'x'"):
        watch.call("connections", Event().wait)
    watch.leave()


def test_a_rank_that_leaves_waits_for_a_heartbeat_that_is_being_written() -> None:
    """A thread that is in torch's code when the interpreter ends would abort the process."""
    watch = FailureWatch(HashStore(), ["rank 0", "rank 1"], 0, 5.0, lambda: None)
    watch.store.write_heartbeat(1, Heartbeat())
    watch.start()
    writing, written = Event(), Event()

    def write_slowly() -> None:
        writing.set()
        written.wait()

    watch._write_heartbeat = write_slowly  # type: ignore[method-assign]
    assert writing.wait(20.0)
    watch.last_answer -= 60.0
    Timer(1.0, written.set).start()
    watch.leave()
    assert not any(thread.is_alive() for thread in watch.threads)
