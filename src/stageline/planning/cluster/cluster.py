"""A cluster: devices with their memory and speed, and the links between them, level by level.

levels from inside out: 4 devices a machine, 2 machines a site

machine 0      machine 1
0  1  2  3  │  4  5  6  7       link(0, 3) is the machine's, link(3, 4) the site's
"""

from __future__ import annotations

import math
import os
from itertools import accumulate
from operator import mul
from typing import Annotated

from pydantic import BeforeValidator

from stageline.arguments import check_type, shown
from stageline.costs import Link
from stageline.errors import PlanError
from stageline.limits import LEAST_AMOUNT, MOST_AMOUNT, MOST_DEVICES, check_most
from stageline.planning.checked import (
    Amount,
    Number,
    Whole,
    checked,
    not_truth,
    read_json,
    write_json,
)
from stageline.planning.tables import table
from stageline.units import format_bytes, parse_bytes

Size = Annotated[float | str, BeforeValidator(not_truth)]  # bytes, or words like "22GiB"


@checked
class Device:
    """Bytes that it holds, and how many times as fast it is as the one of the profile."""

    memory: Size
    speed: Number = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "memory", _in_bytes(self.memory))
        _check_positive("memory", self.memory_bytes, "give what one device holds, like '22GiB'")
        _check_positive("speed", self.speed, "give 1.0 for a device like that of the profile")

    @property
    def memory_bytes(self) -> float:
        return _in_bytes(self.memory)


@checked
class Level:
    """So many of the level inside it, or devices, joined by links alike; bytes a second, seconds.

    >>> Level("machine", size=8, bandwidth=300e9)
    Level(name='machine', size=8, bandwidth=300000000000.0, latency=0.0)
    """

    name: str
    size: Whole
    bandwidth: Number
    latency: Number = 0.0

    def __post_init__(self) -> None:
        of = f"of level {shown(self.name)}"
        _check_positive(f"size {of}", self.size, "leave the level out if it joins nothing")
        check_most(f"size {of}", self.size, MOST_DEVICES, error=PlanError)
        _check_positive(f"bandwidth {of}", self.bandwidth, "give bytes a second")
        if not 0 <= self.latency <= MOST_AMOUNT:
            raise PlanError(
                f"latency {of} is {self.latency}, but has to be 0 or more: give seconds"
            )


@checked
class Cluster:
    """What a plan is made for. Without `levels` a transfer costs nothing.

    Devices that are alike are given by `memory`, others one by one in `devices`. With a
    `host_bandwidth`, in bytes a second, plans may move activations to the host and back.

    >>> machine, site = Level("machine", 8, 300e9), Level("site", 4, 25e9, latency=5e-6)
    >>> cluster = Cluster(num_devices=32, memory="22GiB", levels=(machine, site))
    >>> cluster.device(31)
    Device(memory=23622320128.0, speed=1.0)
    >>> cluster.link(0, 7), cluster.link(7, 8)
    (Link(latency=0.0, bandwidth=300000000000.0), Link(latency=5e-06, bandwidth=25000000000.0))
    """

    num_devices: Whole
    memory: Size | None = None
    devices: tuple[Device, ...] = ()
    levels: tuple[Level, ...] = ()
    host_bandwidth: Amount = 0.0

    def __post_init__(self) -> None:
        if self.num_devices < 1:
            raise PlanError(
                f"num_devices is {shown(self.num_devices)}, but a cluster needs 1 at least"
            )
        check_most("num_devices", self.num_devices, MOST_DEVICES, error=PlanError)
        if self.memory is not None:
            object.__setattr__(self, "memory", Device(self.memory).memory)
        self._check_devices()
        self._check_levels()

    def device(self, number: int) -> Device:
        self._check_number(number)
        return self.devices[number] if self.devices else Device(self.memory or 0)

    def link(self, a: int, b: int) -> Link:
        """That of the innermost level with both devices; a device reaches itself for nothing."""
        self._check_number(a)
        self._check_number(b)
        if a == b or not self.levels:
            return Link()
        spans = accumulate((level.size for level in self.levels), mul)
        level = next(
            level for level, span in zip(self.levels, spans, strict=True) if a // span == b // span
        )
        return Link(level.latency, level.bandwidth)

    def save(self, path: str | os.PathLike[str]) -> None:
        """As JSON."""
        write_json(path, self)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Cluster:
        return read_json(path, Cluster)

    def __str__(self) -> str:
        """In words, with a table of its levels.

        >>> print(Cluster(2, "22GiB", levels=(Level("machine", 2, 2**30, latency=5e-5),)))
        2 devices of 22GiB
        level    joins  latency  bandwidth
        machine      2    50 µs     1GiB/s
        """
        sizes = (format_bytes(each.memory_bytes) for each in self.devices or (self.device(0),))
        words = f"{self.num_devices} devices of {', '.join(dict.fromkeys(sizes))}"
        rows = [
            (
                level.name,
                str(level.size),
                f"{1e6 * level.latency:.4g} µs",
                f"{format_bytes(level.bandwidth)}/s",
            )
            for level in self.levels
        ]
        columns = ("level", "joins", "latency", "bandwidth")
        return "\n".join([words, table(columns, rows, left=("level",))] if rows else [words])

    def _check_devices(self) -> None:
        if (self.memory is None) == (not self.devices):
            seen = "both are given" if self.devices else "neither is given"
            raise PlanError(
                f"memory and devices: {seen}, but a cluster needs one of them: "
                "give memory='22GiB' for devices that are alike, or devices=, one Device each"
            )
        if self.devices and len(self.devices) != self.num_devices:
            raise PlanError(
                f"devices has {len(self.devices)} entries, but num_devices is "
                f"{self.num_devices}: give one each"
            )

    def _check_levels(self) -> None:
        sizes = [level.size for level in self.levels]
        if sizes and math.prod(sizes) != self.num_devices:
            product = " × ".join(map(str, sizes[:8])) + (" × …" if sizes[8:] else "")
            raise PlanError(
                f"levels join {product} = {shown(math.prod(sizes))} devices, but num_devices is "
                f"{self.num_devices}: give sizes from inside out whose product is that"
            )

    def _check_number(self, number: int) -> None:
        check_type("the number of a device", number, int, "they count from 0", PlanError)
        if not 0 <= number < self.num_devices:
            raise PlanError(
                f"device {shown(number)} was asked for, but the cluster has {self.num_devices}: "
                f"give a number from 0 to {self.num_devices - 1}"
            )


def _in_bytes(size: Size) -> float:
    try:
        return parse_bytes(size) if isinstance(size, str) else float(size)
    except (ValueError, OverflowError):
        raise PlanError(
            f"memory is {shown(size)}, but has to be a size in bytes: write it like '22GiB' or "
            "'512MB'"
        ) from None


def _check_positive(name: str, value: float, hint: str) -> None:
    seen = f"{value:g}" if isinstance(value, float) else shown(value)
    if not 0 < value < math.inf:
        raise PlanError(f"{name} is {seen}, but has to be a finite number above 0: {hint}")
    if not LEAST_AMOUNT <= value <= MOST_AMOUNT:
        limits = f"from {LEAST_AMOUNT:g} to {MOST_AMOUNT:g}"
        raise PlanError(f"{name} is {seen}, but has to be {limits}: {hint}")
