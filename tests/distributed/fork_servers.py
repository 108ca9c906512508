"""Start ranks as forks of servers that have imported torch; see `fork_server.py`.

Hashes of text differ from process to process under torchrun, so there are two servers that differ
in them. Servers start when they are first needed, and serve the whole run: the processes of xdist
share them.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import mkdtemp

ROOT = Path(__file__).parents[2]
WORKERS = Path(__file__).parent / "workers"
FOLDER = "STAGELINE_FORK_SERVERS"  # the environment variable that names the folder of sockets
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"}
STACKS = 2.0  # seconds for a process to write the stacks of its threads
PATIENCE = 100.0  # seconds until a server listens; the import of torch takes 20 on a busy machine


class RankProcess:
    """A process of a group. State: the connection to its server, and its exit code at the end."""

    def __init__(self, connection: socket.socket, pid: int, output: Path) -> None:
        self.connection, self.pid, self.path = connection, pid, output
        self.code: int | None = None

    def wait(self, seconds: float) -> int | None:
        """Return the exit code, or None if the process has not ended in that time."""
        if self.code is None:
            self.connection.settimeout(max(0.001, seconds))
            with suppress(TimeoutError):
                self.code = int(self.connection.recv(64))
                self.connection.close()
        return self.code

    def kill(self) -> None:
        if self.code is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def print_stacks(self) -> None:
        """Let the process write what its threads are doing to its output."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)
        self.wait(STACKS)

    @property
    def output(self) -> str:
        """What it has written so far, to standard output and standard error."""
        return self.path.read_text()


@contextmanager
def fork_servers() -> Iterator[None]:
    """Let this process, and those it starts, fork ranks; at the end all servers end."""
    folder = Path(mkdtemp(prefix="stageline-"))
    os.mkfifo(folder / "owner")
    owner = os.open(folder / "owner", os.O_RDWR)
    os.environ[FOLDER] = str(folder)
    try:
        yield
    finally:
        del os.environ[FOLDER]
        os.close(owner)
        shutil.rmtree(folder)


@contextmanager
def ranks(
    worker: str,
    num_ranks: int,
    *arguments: str,
    folder: Path,
    environment: Mapping[str, str] | None = None,
) -> Iterator[list[RankProcess]]:
    """Start a group of processes that write to `folder`/output-<rank>; at the end kill the rest."""
    shared = {"WORLD_SIZE": str(num_ranks), "MASTER_PORT": str(free_port())}
    shared |= {"MASTER_ADDR": "127.0.0.1"} | dict(environment or {})
    processes: list[RankProcess] = []
    try:
        for rank in range(num_ranks):
            request = {
                "script": str(WORKERS / f"{worker}.py"),
                "arguments": arguments,
                "environment": shared | {"RANK": str(rank)},
            }
            processes.append(_fork(request, _server(rank), folder / f"output-{rank}"))
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait(10.0)


def _server(rank: int) -> str:
    """Return one of two, such that neighbours in either direction of a 2 x 2 mesh have both."""
    return f"hash-seed-{1 + rank.bit_count() % 2}"


def _fork(request: Mapping[str, object], server: str, output: Path) -> RankProcess:
    connection = _connect(Path(os.environ[FOLDER]), server)
    with output.open("a") as file:
        socket.send_fds(connection, [json.dumps(request).encode()], [file.fileno()])
    return RankProcess(connection, int(connection.recv(64)), output)


def _connect(folder: Path, name: str) -> socket.socket:
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / name).exists():
            _start_server(folder, name)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(folder / name))
    return connection


def _start_server(folder: Path, name: str) -> None:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    own = {"PYTHONPATH": path, "PYTHONHASHSEED": name.rpartition("-")[2], "PYTHONUNBUFFERED": "1"}
    own |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore:the rendezvous store listens"}
    script = str(Path(__file__).parent / "fork_server.py")
    with (folder / f"{name}.log").open("w+") as log:
        ended = subprocess.run(
            [sys.executable, script, str(folder), name],
            env=os.environ | own,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            timeout=PATIENCE,
            check=False,
        )
        log.seek(0)
        assert ended.returncode == 0, log.read()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
