"""Clusters: links, files, measured links, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import stageline as sl
from stageline.costs import Link
from stageline.errors import PlanError
from stageline.planning.cluster.cluster import Cluster, Device, Level
from stageline.planning.cluster.measure_links import (
    LARGE,
    MessageSeconds,
    count_ranks_per_machine,
    levels_of,
    link_of,
)

MACHINE = Level("machine", 8, 300e9, 1e-6)
SITE = Level("site", 16, 25e9, 5e-6)
WORLD = Level("world", 8, 1e9, 30e-3)


def refused(message: str) -> Any:
    return pytest.raises(PlanError, match=f"^{re.escape(message)}$")


def test_equal_devices_are_given_by_one_memory() -> None:
    cluster = Cluster(num_devices=8, memory="22GiB")
    assert {cluster.device(number) for number in range(8)} == {Device(22 * 2**30)}
    assert cluster == Cluster(8, memory=22 * 2**30)


def test_devices_may_differ_in_memory_and_speed() -> None:
    cluster = Cluster(2, devices=(Device("80GiB", speed=2.5), Device("24GiB")))
    assert [cluster.device(number).speed for number in range(2)] == [2.5, 1.0]
    assert cluster.device(1).memory_bytes == 24 * 2**30


def test_a_link_is_that_of_the_innermost_level_with_both_devices() -> None:
    cluster = Cluster(1024, memory="80GiB", levels=(MACHINE, SITE, WORLD))
    assert cluster.link(0, 7) == cluster.link(7, 0) == Link(1e-6, 300e9)
    assert cluster.link(7, 8) == cluster.link(0, 127) == Link(5e-6, 25e9)
    assert cluster.link(127, 128) == cluster.link(0, 1023) == Link(30e-3, 1e9)


def test_transfers_take_no_time_on_a_device_or_without_levels() -> None:
    assert Cluster(1024, memory="80GiB", levels=(MACHINE, SITE, WORLD)).link(9, 9) == Link()
    assert Cluster(4, memory=1).link(0, 3) == Link()


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_two_devices_share_a_level_when_their_numbers_agree_outside_it(
    sizes: list[int], data: st.DataObject
) -> None:
    levels = tuple(Level(f"level {i}", size, 10.0**-i) for i, size in enumerate(sizes))
    coordinates = st.tuples(*(st.integers(0, size - 1) for size in sizes))
    a, b = data.draw(coordinates), data.draw(coordinates)

    def number(coordinate: tuple[int, ...]) -> int:
        total = 0
        for size, place in zip(reversed(sizes), reversed(coordinate), strict=True):
            total = total * size + place
        return total

    cluster = Cluster(number(tuple(size - 1 for size in sizes)) + 1, memory=1, levels=levels)
    differing = [level for level, x, y in zip(levels, a, b, strict=True) if x != y]
    expected = Link(0.0, differing[-1].bandwidth) if differing else Link()
    assert cluster.link(number(a), number(b)) == expected


def test_a_cluster_is_read_back_from_its_file(tmp_path: Path) -> None:
    alike = Cluster(1024, memory="80GiB", levels=(MACHINE, SITE, WORLD))
    mixed = Cluster(2, devices=(Device("80GiB", speed=2.5), Device("24GiB")))
    for cluster in (alike, mixed):
        cluster.save(tmp_path / "cluster.json")
        assert Cluster.load(tmp_path / "cluster.json") == cluster


def test_a_file_may_give_memory_as_text(tmp_path: Path) -> None:
    (tmp_path / "cluster.json").write_text('{"num_devices": 2, "memory": "1KiB"}')
    assert Cluster.load(tmp_path / "cluster.json") == Cluster(2, memory=1024)


def test_an_invalid_file_is_refused_with_its_name_and_field(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    path.write_text('{"num_devices": 2, "memory": "1KiB", "memmory": 3}')
    with pytest.raises(PlanError, match=r"cluster\.json' has an invalid memmory"):
        Cluster.load(path)
    path.write_text('{"num_devices": 0, "memory": 1}')
    with pytest.raises(PlanError, match="num_devices is 0, but a cluster needs at least 1"):
        Cluster.load(path)
    with pytest.raises(PlanError, match=r"nowhere\.json' cannot be read"):
        Cluster.load(tmp_path / "nowhere.json")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"num_devices": 0, "memory": 1},
            "num_devices is 0, but a cluster needs at least 1",
        ),
        (
            {"num_devices": 2},
            (
                "memory and devices: neither is given, but a cluster needs one of them: give "
                "memory='22GiB' if all devices are the same, or devices= with one Device for each"
            ),
        ),
        (
            {"num_devices": 1, "memory": 1, "devices": (Device(1),)},
            (
                "memory and devices: both are given, but a cluster needs one of them: give "
                "memory='22GiB' if all devices are the same, or devices= with one Device for each"
            ),
        ),
        (
            {"num_devices": 3, "devices": (Device(1), Device(1))},
            "devices has 2 entries, but num_devices is 3: give one for each device",
        ),
        (
            {"num_devices": 2, "memory": -5},
            (
                "memory is -5, but has to be a finite number above 0: "
                "give the memory of one device, like '22GiB'"
            ),
        ),
        (
            {"num_devices": 100, "memory": 1, "levels": (MACHINE, SITE)},
            (
                "levels have 8 × 16 = 128 devices, but num_devices is 100: "
                "give sizes from the inside out whose product is that"
            ),
        ),
        (
            {"num_devices": "many", "memory": 1},
            ("Cluster has an invalid num_devices: input should be a number (got 'many')"),
        ),
        (
            {"num_devices": 1, "memory": "22 bananas"},
            (
                "memory is '22 bananas', but has to be a number of bytes: "
                "write it like '22GiB' or '512MB'"
            ),
        ),
    ],
)
def test_an_invalid_cluster_is_refused(given: dict[str, Any], message: str) -> None:
    with refused(message):
        Cluster(**given)


def test_an_invalid_device_or_level_is_refused() -> None:
    with refused(
        "speed is 0, but has to be a finite number above 0: "
        "give 1.0 for a device as fast as that of the profile"
    ):
        Device(1, speed=0)
    with refused(
        "bandwidth of level 'site' is 0, but has to be a finite number above 0: "
        "give bytes per second"
    ):
        Level("site", 2, bandwidth=0)
    with refused(
        "size of level 'site' is -2, but has to be a finite number above 0: "
        "omit a level without members"
    ):
        Level("site", -2, bandwidth=1)
    with refused("latency of level 'site' is -1.0, but has to be at least 0: give seconds"):
        Level("site", 2, bandwidth=1, latency=-1)


@pytest.mark.parametrize("number", [-1, 4])
def test_a_device_number_out_of_range_is_refused(number: int) -> None:
    cluster = Cluster(4, memory=1)
    message = (
        f"the number of a device is {number}, but the cluster has 4: give a number from 0 to 3"
    )
    with refused(message):
        cluster.link(0, number)
    with refused(message):
        cluster.device(number)


# Measured links

FAST, SLOW = sl.Link(1e-6, 10e9), sl.Link(5e-5, 1e9)


def test_links_within_and_between_machines_become_two_levels() -> None:
    links = [FAST, FAST, SLOW, FAST, FAST, SLOW, FAST, FAST]  # three machines with three ranks
    assert levels_of(3, links) == (
        Level("machine", 3, bandwidth=10e9, latency=1e-6),
        Level("network", 3, bandwidth=1e9, latency=5e-5),
    )


def test_a_level_of_one_member_is_omitted() -> None:
    assert [level.name for level in levels_of(3, [FAST, FAST])] == ["machine"]
    assert [level.name for level in levels_of(1, [SLOW, SLOW])] == ["network"]


def test_one_slow_link_does_not_change_the_median_of_its_level() -> None:
    assert levels_of(4, [FAST, SLOW, FAST]) == (Level("machine", 4, 10e9, 1e-6),)


def test_a_measured_cluster_has_the_measured_links() -> None:
    cluster = sl.Cluster(4, "1GiB", levels=levels_of(2, [FAST, SLOW, FAST]))
    assert [cluster.link(a, a + 1) for a in range(3)] == [FAST, SLOW, FAST]


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        ("aab", "there are 2 on a, 1 on b ranks, but each machine needs the same number"),
        ("abab", "machines a, b, a, b, but the ranks of a machine have to be consecutive"),
    ],
)
def test_unevenly_distributed_ranks_are_refused(hosts: str, message: str) -> None:
    with pytest.raises(sl.PlanError, match=message):
        count_ranks_per_machine(list(hosts))


def test_a_large_message_as_fast_as_a_small_one_is_refused() -> None:
    assert link_of(MessageSeconds(0.25, 0.25 + LARGE / 4e6)) == sl.Link(0.25, 4e6)
    with pytest.raises(sl.PlanError, match=r"took 0.25 s, no longer .* measure again"):
        link_of(MessageSeconds(0.25, 0.25))


def test_measuring_links_without_a_process_group_is_refused() -> None:
    with pytest.raises(
        sl.PlanError, match="there is no process group, but links are measured between its"
    ):
        sl.measure_links()


def test_an_invalid_memory_is_refused_before_anything_is_measured() -> None:
    with pytest.raises(sl.PlanError, match="memory is 'much', but has to be a number of bytes"):
        sl.measure_links(memory="much")
