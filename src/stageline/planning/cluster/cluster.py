"""Cluster: devices with their memory and speed, and the links between them, in levels.

levels from the inside out: 4 devices per machine, 2 machines per site

machine 0      machine 1
0  1  2  3  │  4  5  6  7       link(0, 3) is within a machine, link(3, 4) within the site
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
from stageline.planning.console import format_table
from stageline.planning.validation import (
    Amount,
    Number,
    WholeNumber,
    read_json,
    reject_bool,
    validated,
    write_json,
)
from stageline.units import format_bytes, parse_bytes

ByteSize = Annotated[float | str, BeforeValidator(reject_bool)]  # bytes, or text like "22GiB"


@validated
class Device:
    """One device of a cluster."""

    memory: ByteSize
    speed: Number = 1.0  # relative to the device of the profile

    def __post_init__(self) -> None:
        object.__setattr__(self, "memory", _parse_size(self.memory))
        _check_positive("memory", self.memory_bytes, "give the memory of one device, like '22GiB'")
        _check_positive("speed", self.speed, "give 1.0 for a device as fast as that of the profile")

    @property
    def memory_bytes(self) -> float:
        """The device's memory in bytes."""
        return _parse_size(self.memory)


@validated
class Level:
    """A group of devices, or of groups of the level inside it, joined by links of one kind.

    >>> Level("machine", size=8, bandwidth=300e9)
    Level(name='machine', size=8, bandwidth=300000000000.0, latency=0.0)
    """

    name: str
    size: WholeNumber  # members: devices, or groups of the level inside it
    bandwidth: Number  # bytes per second
    latency: Number = 0.0  # seconds

    def __post_init__(self) -> None:
        of = f"of level {shown(self.name)}"
        _check_positive(f"size {of}", self.size, "omit a level without members")
        check_most(f"size {of}", self.size, MOST_DEVICES, error=PlanError)
        _check_positive(f"bandwidth {of}", self.bandwidth, "give bytes per second")
        if not 0 <= self.latency <= MOST_AMOUNT:
            raise PlanError(
                f"latency {of} is {self.latency}, but has to be at least 0: give seconds"
            )


@validated
class Cluster:
    """The devices that a plan is made for. Without `levels`, transfers take no time.

    Give `memory` if all devices are the same, or `devices` with one `Device` for each. With a
    `host_bandwidth`, in bytes per second, plans may offload activations to the host.

    >>> machine, site = Level("machine", 8, 300e9), Level("site", 4, 25e9, latency=5e-6)
    >>> cluster = Cluster(num_devices=32, memory="22GiB", levels=(machine, site))
    >>> cluster.device(31)
    Device(memory=23622320128.0, speed=1.0)
    >>> cluster.link(0, 7), cluster.link(7, 8)
    (Link(latency=0.0, bandwidth=300000000000.0), Link(latency=5e-06, bandwidth=25000000000.0))
    """

    num_devices: WholeNumber
    memory: ByteSize | None = None
    devices: tuple[Device, ...] = ()
    levels: tuple[Level, ...] = ()
    host_bandwidth: Amount = 0.0

    def __post_init__(self) -> None:
        if self.num_devices < 1:
            raise PlanError(
                f"num_devices is {shown(self.num_devices)}, but a cluster needs at least 1"
            )
        check_most("num_devices", self.num_devices, MOST_DEVICES, error=PlanError)
        if self.memory is not None:
            object.__setattr__(self, "memory", Device(self.memory).memory)
        self._check_devices()
        self._check_levels()

    def device(self, number: int) -> Device:
        """Return a device by its number, from 0 up."""
        self._check_number(number)
        return self.devices[number] if self.devices else Device(self.memory or 0)

    def link(self, a: int, b: int) -> Link:
        """Return the link between two devices: that of the innermost level that contains both."""
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
        """Write the cluster to a JSON file."""
        write_json(path, self)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Cluster:
        """Read a cluster from a JSON file that `save` has written."""
        return read_json(path, Cluster)

    def __str__(self) -> str:
        """Return a description with a table of the levels.

        >>> print(Cluster(2, "22GiB", levels=(Level("machine", 2, 2**30, latency=5e-5),)))
        2 devices of 22GiB
        level    size  latency  bandwidth
        machine     2    50 µs     1GiB/s
        """
        sizes = (format_bytes(each.memory_bytes) for each in self.devices or (self.device(0),))
        head = f"{self.num_devices} devices of {', '.join(dict.fromkeys(sizes))}"
        rows = [
            (
                level.name,
                str(level.size),
                f"{1e6 * level.latency:.4g} µs",
                f"{format_bytes(level.bandwidth)}/s",
            )
            for level in self.levels
        ]
        columns = ("level", "size", "latency", "bandwidth")
        return "\n".join([head, format_table(columns, rows, left=("level",))] if rows else [head])

    def _check_devices(self) -> None:
        if (self.memory is None) == (not self.devices):
            given = "both are given" if self.devices else "neither is given"
            raise PlanError(
                f"memory and devices: {given}, but a cluster needs one of them: give "
                "memory='22GiB' if all devices are the same, or devices= with one Device for each"
            )
        if self.devices and len(self.devices) != self.num_devices:
            raise PlanError(
                f"devices has {len(self.devices)} entries, but num_devices is "
                f"{self.num_devices}: give one for each device"
            )

    def _check_levels(self) -> None:
        sizes = [level.size for level in self.levels]
        if sizes and math.prod(sizes) != self.num_devices:
            product = " × ".join(map(str, sizes[:8])) + (" × …" if sizes[8:] else "")
            raise PlanError(
                f"levels have {product} = {shown(math.prod(sizes))} devices, but num_devices is "
                f"{self.num_devices}: give sizes from the inside out whose product is that"
            )

    def _check_number(self, number: int) -> None:
        check_type("the number of a device", number, int, "numbers start at 0", PlanError)
        if not 0 <= number < self.num_devices:
            raise PlanError(
                f"the number of a device is {shown(number)}, but the cluster has "
                f"{self.num_devices}: give a number from 0 to {self.num_devices - 1}"
            )


def _parse_size(size: ByteSize) -> float:
    try:
        return parse_bytes(size) if isinstance(size, str) else float(size)
    except (ValueError, OverflowError):
        raise PlanError(
            f"memory is {shown(size)}, but has to be a number of bytes: write it like '22GiB' or "
            "'512MB'"
        ) from None


def _check_positive(name: str, value: float, hint: str) -> None:
    seen = f"{value:g}" if isinstance(value, float) else shown(value)
    if not 0 < value < math.inf:
        raise PlanError(f"{name} is {seen}, but has to be a finite number above 0: {hint}")
    if not LEAST_AMOUNT <= value <= MOST_AMOUNT:
        limits = f"from {LEAST_AMOUNT:g} to {MOST_AMOUNT:g}"
        raise PlanError(f"{name} is {seen}, but has to be {limits}: {hint}")
