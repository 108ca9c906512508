"""Links: from what messages took to the levels of a cluster, and what cannot be one."""

from __future__ import annotations

import pytest

import stageline as sl
from stageline.planning.cluster.cluster import Level
from stageline.planning.cluster.measure_links import (
    LARGE,
    MessageSeconds,
    count_ranks_per_machine,
    levels_of,
    link_of,
)

FAST, SLOW = sl.Link(1e-6, 10e9), sl.Link(5e-5, 1e9)


def test_links_inside_of_machines_and_between_them_are_levels_of_their_own() -> None:
    links = [FAST, FAST, SLOW, FAST, FAST, SLOW, FAST, FAST]  # three machines with three ranks
    assert levels_of(3, links) == (
        Level("machine", 3, bandwidth=10e9, latency=1e-6),
        Level("network", 3, bandwidth=1e9, latency=5e-5),
    )


def test_a_level_that_joins_nothing_is_left_out() -> None:
    assert [level.name for level in levels_of(3, [FAST, FAST])] == ["machine"]
    assert [level.name for level in levels_of(1, [SLOW, SLOW])] == ["network"]


def test_one_bad_link_does_not_stand_for_its_level() -> None:
    assert levels_of(4, [FAST, SLOW, FAST]) == (Level("machine", 4, 10e9, 1e-6),)


def test_measured_levels_make_a_cluster_whose_links_are_those_measured() -> None:
    cluster = sl.Cluster(4, "1GiB", levels=levels_of(2, [FAST, SLOW, FAST]))
    assert [cluster.link(a, a + 1) for a in range(3)] == [FAST, SLOW, FAST]


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        ("aab", "there are 2 on a, 1 on b ranks, but each machine needs the same number"),
        ("abab", "machines a, b, a, b, but the ranks of a machine have to be consecutive"),
    ],
)
def test_ranks_that_are_spread_unevenly_are_refused(hosts: str, message: str) -> None:
    with pytest.raises(sl.PlanError, match=message):
        count_ranks_per_machine(list(hosts))


def test_a_large_message_that_takes_no_longer_than_a_small_one_is_no_measurement() -> None:
    assert link_of(MessageSeconds(0.25, 0.25 + LARGE / 4e6)) == sl.Link(0.25, 4e6)
    with pytest.raises(sl.PlanError, match=r"took 0.25 s, no longer .* measure again"):
        link_of(MessageSeconds(0.25, 0.25))


def test_without_other_processes_there_is_nothing_to_measure() -> None:
    with pytest.raises(
        sl.PlanError, match="there is no process group, but links are measured between its"
    ):
        sl.measure_links()


def test_a_memory_that_is_none_is_refused_before_anything_is_measured() -> None:
    with pytest.raises(sl.PlanError, match="memory is 'much', but has to be a number of bytes"):
        sl.measure_links(memory="much")
