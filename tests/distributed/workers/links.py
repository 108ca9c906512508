"""Measures links as if ranks were on the machines that are named: hosts, delay in ms.

With a third argument messages go between simulated devices.
"""

from __future__ import annotations

import os
import socket
import sys
from time import sleep
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import stageline as sl
from stageline.planning.cluster import measure_links
from stageline.runtime.accelerators.accelerator import Accelerator
from stageline.runtime.backends.processes.channels.ordered_channel import OrderedChannel
from stageline.runtime.devices import accelerators_of

SLOW_FROM = 2**20  # bytes: messages between machines that take ten times the delay


def main() -> None:
    hosts, delay = sys.argv[1].split(","), float(sys.argv[2]) / 1e3
    rank = int(os.environ["RANK"])
    send, send_on_channel = dist.send, OrderedChannel._send

    def wait(message: Tensor, target: int) -> None:
        if hosts[rank] != hosts[target]:
            sleep(delay if message.nbytes < SLOW_FROM else 10 * delay)

    def delayed(message: Tensor, target: int, *options: Any) -> None:
        if hosts[rank] == "leaves":
            os._exit(3)
        wait(message, target)
        send(message, target, *options)

    def delayed_on_channel(channel: OrderedChannel, message: Tensor) -> None:
        wait(message, channel.other)
        send_on_channel(channel, message)

    dist.send = delayed  # type: ignore[assignment]  # the same, but later
    OrderedChannel._send = delayed_on_channel  # type: ignore[assignment, method-assign]  # as above
    device = None
    if len(sys.argv) > 3:
        device = "cpu"
        measure_links.accelerators_of = simulated  # type: ignore[assignment, attr-defined]
    socket.gethostname = lambda: hosts[rank]
    dist.init_process_group("gloo")
    try:
        cluster = sl.measure_links(device=device, memory="3GiB")
    except sl.StagelineError as error:
        print(f"{type(error).__name__}: {error}")
        raise SystemExit(1) from None
    for level in cluster.levels:
        print(f"level {level.name} {level.size} {level.latency!r} {level.bandwidth!r}")
    print(f"link of 1 and 2: {cluster.link(1, 2)}, {cluster.device(0)}")
    dist.destroy_process_group()


def simulated(devices: list[torch.device], **_: bool) -> tuple[Accelerator | None, ...]:
    return accelerators_of(devices, simulated=True)


if __name__ == "__main__":
    main()
