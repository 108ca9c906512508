"""Hashes of text differ from process to process; what processes agree on may not depend on them."""

from __future__ import annotations

from tests.distributed.launch import launch


def test_the_order_of_inputs_and_of_leaves_does_not_depend_on_hashes() -> None:
    ends = launch("hashes", 2)
    assert [ended.code for ended in ends] == [0, 0], ends
    (hashed, *orders), (hashed_elsewhere, *orders_elsewhere) = (
        ended.output.splitlines() for ended in ends
    )
    assert hashed != hashed_elsewhere
    assert orders == orders_elsewhere
    assert orders[0] == "['x', 'pos', 'mask', 'kind']"
