"""Measures links as if ranks were on the machines that are named: hosts, delay in ms."""

from __future__ import annotations

import os
import socket
import sys
from time import sleep
from typing import Any

import torch.distributed as dist
from torch import Tensor

import stageline as sl

SLOW_FROM = 2**20  # bytes: messages between machines that take ten times the delay


def main() -> None:
    hosts, delay = sys.argv[1].split(","), float(sys.argv[2]) / 1e3
    rank = int(os.environ["RANK"])
    send = dist.send

    def delayed(message: Tensor, target: int, *options: Any) -> None:
        if hosts[rank] == "leaves":
            os._exit(3)
        if hosts[rank] != hosts[target]:
            sleep(delay if message.nbytes < SLOW_FROM else 10 * delay)
        send(message, target, *options)

    dist.send = delayed  # type: ignore[assignment]  # the same, but later
    socket.gethostname = lambda: hosts[rank]
    dist.init_process_group("gloo")
    try:
        cluster = sl.measure_links(memory="3GiB")
    except sl.StagelineError as error:
        print(f"{type(error).__name__}: {error}")
        raise SystemExit(1) from None
    for level in cluster.levels:
        print(f"level {level.name} {level.size} {level.latency!r} {level.bandwidth!r}")
    print(f"link of 1 and 2: {cluster.link(1, 2)}, {cluster.device(0)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
