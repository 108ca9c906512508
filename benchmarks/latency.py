"""A slow network: every message 20 ms late, on emulated accelerators in real processes.

    stageline run --num-processes 4 benchmarks/latency.py

Prints for several schedules what a step takes, and what the simulator says with that latency.
"""

from __future__ import annotations

from statistics import median
from time import perf_counter, sleep

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import stageline as sl
from stageline.runtime.backends.processes.backend import ProcessesBackend
from stageline.runtime.backends.processes.messages.gloo_messages import Incoming
from stageline.runtime.engine.minibatch import Message, MessageKey
from stageline.zoo.emulated import Occupy

LATENCY, FORWARD = 0.020, 0.010  # seconds
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_h2", "zbv")


class Late(Incoming):
    """Gives a message out only some time after it was sent."""

    def take(self, key: MessageKey) -> Message:
        message = super().take(key)
        sleep(max(0.0, message.sent_at + LATENCY - perf_counter()))
        return message


def slow_down(pipe: sl.Pipeline) -> None:
    """Before its first step, when no message is promised yet."""
    backend = pipe._session.backend  # noqa: SLF001  to measure, it reaches inside
    assert isinstance(backend, ProcessesBackend)
    connection = backend.connection
    backend.incoming = Late(connection.groups, connection.limit)


def measured(schedule: sl.Schedule, *, is_slow: bool, steps: int = 3) -> float:
    """Seconds of a step, in the median, on the slowest rank."""
    layers = (Occupy(FORWARD, FORWARD, FORWARD) for _ in range(schedule.num_stages))
    pipe = sl.Pipeline(
        nn.Sequential(*layers),
        _mean,
        num_ranks=schedule.num_ranks,
        num_microbatches=schedule.num_microbatches,
        schedule=schedule,
        options=sl.Options(shared_memory=False),
    )
    if is_slow:
        slow_down(pipe)
    batch = torch.ones(schedule.num_microbatches, 1)
    taken = []
    for _ in range(steps + 1):
        dist.barrier()
        start = perf_counter()
        pipe.step(batch, batch)
        slowest = torch.tensor(perf_counter() - start)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        taken.append(float(slowest))
    pipe.close()
    return median(taken[1:])


def _mean(output: Tensor, _: Tensor) -> Tensor:
    return output.mean()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    num_ranks = dist.get_world_size()
    table = Table(box=None, header_style="bold")
    for column in ("schedule", "no latency, s", "20 ms late, s", "simulated, s", "ratio"):
        table.add_column(column, justify="right")
    rows = []
    for name in SCHEDULES:
        schedule = sl.build_schedule(name, num_ranks=num_ranks, num_microbatches=2 * num_ranks)
        costs = sl.Costs(FORWARD, FORWARD, FORWARD, transfer=LATENCY)
        simulated = sl.simulate(schedule, costs).makespan
        plain, late = (measured(schedule, is_slow=is_slow) for is_slow in (False, True))
        rows.append((simulated, late))
        numbers = (plain, late, simulated, late / simulated)
        table.add_row(name, *(f"{number:.3f}" for number in numbers))
    if dist.get_rank() == 0:
        orders = [sorted(range(len(rows)), key=lambda i: rows[i][column]) for column in (0, 1)]
        Console(width=100).print(table)
        names = [", ".join(SCHEDULES[i] for i in order) for order in orders]
        print(f"fastest first, simulated: {names[0]}\nfastest first, measured:  {names[1]}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
