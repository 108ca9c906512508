"""Run a script or module as several processes on this machine: torchrun, on loopback only."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn

import typer
from torch.distributed import TCPStore, run  # type: ignore[attr-defined]  # it is in the docs
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from stageline.arguments import check_size
from stageline.cli import bound
from stageline.errors import ModelError, StageError
from stageline.limits import MOST_PROCESSES, MOST_RESTARTS, check_most

BINDING = bound.__name__
LOOPBACK = "127.0.0.1"
RENDEZVOUS = "stageline"  # the name under which torch finds `LoopbackRendezvous`
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # these end the command
LEFT_TO_TORCH = "SIGQUIT"  # torch needs at least one signal to handle


class StoppedBySignal(KeyboardInterrupt):
    """Raised when a signal has ended this command and all processes that it had started."""

    def __init__(self, number: int) -> None:
        super().__init__(f"{signal.Signals(number).name}: all ranks were stopped")
        self.number = number


def launch(
    script: Path,
    arguments: Sequence[str],
    num_processes: int,
    max_restarts: int = 0,
    *,
    bind_cores: bool = True,
) -> None:
    """Run a script until all processes have ended; raise `StageError` if one of them failed."""
    if not script.is_file():
        raise ModelError(f"{script} does not exist, but has to be a Python script")
    command = [sys.executable, "-u", str(script), *arguments]
    _launch(str(script), command, num_processes, max_restarts, bind_cores=bind_cores)


def launch_module(module: str, arguments: Sequence[str], num_processes: int) -> None:
    """Run a module in the same way, as `python -m` does."""
    _launch(module, [sys.executable, "-u", "-m", module, *arguments], num_processes)


@contextmanager
def exit_on_signal() -> Iterator[None]:
    """Print `StoppedBySignal` as one line and exit with the code that shells use for the signal."""
    try:
        yield
    except StoppedBySignal as stop:
        typer.echo(str(stop), err=True)
        raise typer.Exit(128 + stop.number) from None


def _launch(
    name: str,
    command: Sequence[str],
    num_processes: int,
    max_restarts: int = 0,
    *,
    bind_cores: bool = True,
) -> None:
    check_size("num_processes", num_processes)
    advice = "use fewer, or several machines with torchrun"
    check_most("num_processes", num_processes, MOST_PROCESSES, advice)
    check_size("max_restarts", max_restarts, least=0)
    check_most("max_restarts", max_restarts, MOST_RESTARTS)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does, but without its warning
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    rendezvous_handler_registry.register(RENDEZVOUS, LoopbackRendezvous)
    options = [f"--nproc-per-node={num_processes}", f"--max-restarts={max_restarts}"]
    options += [f"--rdzv-backend={RENDEZVOUS}", f"--rdzv-endpoint={LOOPBACK}:0"]
    options += [f"--local-addr={LOOPBACK}", f"--signals-to-handle={LEFT_TO_TORCH}", "--no-python"]
    binding = [sys.executable, "-m", BINDING] if bind_cores else []
    try:
        with TemporaryDirectory(prefix="stageline_") as logs, _stopped_by_signals(), _no_logs():
            run.main([*options, f"--log-dir={logs}", *binding, *command])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        raise StageError(
            f"rank {rank} of {name} {_ending(failure.exitcode)}, and the others were stopped: see "
            "its output above"
        ) from None
    except SignalException as error:
        raise StoppedBySignal(error.sigval) from None


def _ending(code: int) -> str:
    """Describe how a process ended, given its return code as `subprocess` defines it."""
    if code >= 0:
        return f"ended with exit code {code}"
    names = {number.value: number.name for number in signal.Signals}
    return f"was killed by signal {-code} ({names.get(-code, 'unknown')})"


@contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """Raise `StoppedBySignal` for the first signal in `SIGNALS`, and ignore later ones.

    As the exception propagates, torch ends the processes with SIGTERM, and after 30 s with SIGKILL;
    a second exception would leave them running. Torch's own handler would forward SIGINT, and every
    rank would print a traceback. Only the main thread can handle signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, _: object) -> NoReturn:
        for each in SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        raise StoppedBySignal(number)

    before = {each: signal.signal(each, stop) for each in SIGNALS}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


@contextmanager
def _no_logs() -> Iterator[None]:
    """Silence torch's log of the processes it waits for: it repeats what they print."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)


class LoopbackRendezvous(RendezvousHandler):
    """A rendezvous of the processes on this machine. State: the store of the current start.

    Each start gets a new store. With torchrun's store for a fixed address and port, restarted
    processes may still read the addresses of the processes before them.
    """

    def __init__(self, parameters: RendezvousParameters) -> None:
        self.run_id = parameters.run_id
        self.store: TCPStore | None = None

    def get_backend(self) -> str:
        return RENDEZVOUS

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        self.store = _store_on_loopback()
        return RendezvousInfo(self.store, 0, 1, RendezvousStoreInfo(LOOPBACK, self.store.port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self.run_id

    def shutdown(self) -> bool:
        self.store = None
        return True


def _store_on_loopback() -> TCPStore:
    with socket.socket() as listening:
        listening.bind((LOOPBACK, 0))
        listening.listen()
        port = listening.getsockname()[1]
        return TCPStore(
            LOOPBACK,
            port,
            1,
            is_master=True,
            timeout=timedelta(minutes=5),
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )
