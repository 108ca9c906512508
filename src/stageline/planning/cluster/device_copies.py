"""Time copies between devices of one process, as ranks that are threads send messages."""

from __future__ import annotations

from typing import Any

import torch

from stageline.costs import Link
from stageline.planning.cluster.measure_links import LARGE, SMALL, MessageSeconds, link_of
from stageline.runtime.accelerators.accelerator import Accelerator

COPIES = 20


def copy_link(source: Accelerator, target: Accelerator) -> Link:
    """Measure the latency and bandwidth of copies from one device to another."""
    return link_of(MessageSeconds(*(_seconds(source, target, size) for size in (SMALL, LARGE))))


def queue_copies(source: Accelerator, target: Accelerator, num_bytes: int) -> tuple[Any, Any]:
    """Queue copies on streams of their own; return the target's times before and after them.

    One more copy, which is not timed, comes first: devices connect when they first copy.
    """
    out, into = source.new_stream("copies out"), target.new_stream("copies in")
    with target.queueing_on(into), source.queueing_on(out):
        tensor = torch.zeros(num_bytes, dtype=torch.uint8, device=source.device)
        target.copy_from(tensor, source)
        begin = target.record_time()
        for _ in range(COPIES):
            target.copy_from(tensor, source)
        return begin, target.record_time()


def _seconds(source: Accelerator, target: Accelerator, num_bytes: int) -> float:
    times = queue_copies(source, target, num_bytes)
    source.synchronize()
    target.synchronize()
    return target.seconds_between(*times) / COPIES
