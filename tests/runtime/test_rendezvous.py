"""Whether the rendezvous store can be reached from other machines."""

from __future__ import annotations

import sys
from datetime import timedelta

import pytest
from torch.distributed import (  # type: ignore[attr-defined]  # they are in its docs
    HashStore,
    PrefixStore,
    TCPStore,
)

from stageline.cli.launch import _store_on_loopback
from stageline.runtime.backends.processes.rendezvous import reachable_address, warn_if_reachable

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells who listens")


def test_a_store_of_torch_listens_on_all_addresses_and_that_is_told() -> None:
    store = TCPStore(
        "127.0.0.1", 0, 1, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=9)
    )
    prefixed = PrefixStore("a", PrefixStore("b", store))
    assert f"port {store.port}" in str(reachable_address(prefixed))
    with pytest.warns(RuntimeWarning, match="beyond this machine's loopback"):
        warn_if_reachable(prefixed)


def test_the_store_of_stageline_run_cannot_be_reached() -> None:
    store = _store_on_loopback()
    assert reachable_address(store) is None
    warn_if_reachable(store)


def test_a_store_without_a_port_is_not_reached() -> None:
    assert reachable_address(HashStore()) is None
