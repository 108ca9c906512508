"""Processes that do one task after another, and are replaced when one of them fails or hangs.

    driver ─┬─► process 0 ─┐
            ├─► process 1 ─┼─► a reply of each, in a time limit
            └─► process 2 ─┘

Starting a process and importing the libraries takes ten seconds, a task less than one.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from tempfile import mkdtemp
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.models.catalogue import catalogue

START = 120.0  # seconds that the first task may take more, on a busy machine: imports
GRACE = 5.0  # seconds in which a process ends by itself
MAX_REASON = 100  # characters


@dataclass(frozen=True)
class Failure:
    """Why a task has no result."""

    reason: str


class WorkerGroup:
    """Several processes in one group of torch.distributed, or a single one without.

    State: the processes and the connections to them; none before the first task.
    """

    def __init__(self, num_processes: int) -> None:
        self.num_processes = num_processes
        self.processes: list[SpawnProcess] = []
        self.connections: list[Connection[Any, Any]] = []

    def run(self, task: Callable[..., Any], *arguments: Any, seconds: float) -> list[Any]:
        """Return the result of each process, a `Failure` where there is none."""
        deadline = monotonic() + seconds
        if not self.processes:
            self._start()
            deadline += START
        for connection in self.connections:
            connection.send((task, arguments))
        replies, is_complete = self._replies(deadline, seconds)
        failed = any(isinstance(reply, Failure) for reply in replies)
        if not is_complete or (failed and self.num_processes > 1):
            self.close(at_once=True)  # its processes may wait for each other
        return replies

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        store = str(Path(mkdtemp(prefix="stageline-table-")) / "store")
        for rank in range(self.num_processes):
            ours, theirs = context.Pipe()
            place = rank, self.num_processes, store
            process = context.Process(target=serve, args=(theirs, *place), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.connections.append(ours)

    def _replies(self, deadline: float, seconds: float) -> tuple[list[Any], bool]:
        """Return the replies, and whether all processes have sent one."""
        replies: list[Any] = [Failure(f"takes more than {seconds:.0f} s")] * self.num_processes
        silent = {connection: rank for rank, connection in enumerate(self.connections)}
        while silent and (left := deadline - monotonic()) > 0:
            for connection in wait(list(silent), left):
                assert isinstance(connection, Connection)
                try:
                    replies[silent[connection]] = connection.recv()
                except (EOFError, ConnectionResetError):
                    process = self.processes[silent[connection]]
                    process.join(GRACE)
                    replies[silent[connection]] = Failure(f"process ended: {process.exitcode}")
                    return replies, False
                del silent[connection]
        return replies, not silent

    def close(self, *, at_once: bool = False) -> None:
        """End the processes; the next task starts others."""
        for connection in self.connections:
            connection.close()
        for process in self.processes:
            if not at_once:
                process.join(GRACE)
            process.kill()
            process.join()
        self.processes, self.connections = [], []


def serve(connection: Connection[Any, Any], rank: int, num_processes: int, store: str) -> None:
    """Do tasks until there is nobody to give one."""
    _be_quiet()
    torch.set_num_threads(1)
    if num_processes > 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=num_processes,
            timeout=timedelta(seconds=START),
        )
    catalogue()  # imports the libraries
    gc.freeze()  # a recording looks at all objects; those of libraries are 400,000
    while True:
        try:
            task, arguments = connection.recv()
        except EOFError:
            return
        try:
            connection.send(task(*arguments))
        except Exception as error:  # the table has to go on
            connection.send(Failure(short_reason(error)))


def _be_quiet() -> None:
    """Let libraries write nowhere: their progress would tear the table's apart."""
    warnings.simplefilter("ignore")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


def short_reason(error: BaseException) -> str:
    """Return the type and the first line of an error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0] if lines else ''}"
    return text if len(text) <= MAX_REASON else text[: MAX_REASON - 1] + "…"
