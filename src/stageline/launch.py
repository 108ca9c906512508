"""A script or module as several processes on this machine: torchrun, listening on loopback only."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn

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
from stageline.errors import ModelError, StageError
from stageline.limits import MOST_PROCESSES, MOST_RESTARTS, check_most

HERE, NAME = "127.0.0.1", "stageline"


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # that ask a command to end
LEFT_TO_TORCH = "SIGQUIT"  # of which it has to have one


class Stopped(KeyboardInterrupt):
    """A signal asked this process to end, and all that it had started are ended."""

    def __init__(self, number: int) -> None:
        super().__init__(f"{signal.Signals(number).name}: all ranks were stopped")
        self.number = number


def launch(script: Path, arguments: Sequence[str], ranks: int, max_restarts: int = 0) -> None:
    """Run a script until all processes have ended; raise `StageError` if one of them failed."""
    if not script.is_file():
        raise ModelError(f"{script} is not there, but has to be a Python script")
    _launch(str(script), [str(script), *arguments], ranks, max_restarts)


def launch_module(module: str, arguments: Sequence[str], ranks: int) -> None:
    """Run what `python -m` runs, in the same way."""
    _launch(module, ["--module", module, *arguments], ranks)


def _launch(name: str, command: Sequence[str], ranks: int, max_restarts: int = 0) -> None:
    check_size("ranks", ranks)
    check_most("ranks", ranks, MOST_PROCESSES, "use fewer, or several machines with torchrun")
    check_size("max_restarts", max_restarts, least=0)
    check_most("max_restarts", max_restarts, MOST_RESTARTS)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does, but with no warning
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    rendezvous_handler_registry.register(NAME, Loopback)
    options = [f"--nproc-per-node={ranks}", f"--max-restarts={max_restarts}"]
    options += [f"--rdzv-backend={NAME}", f"--rdzv-endpoint={HERE}:0", f"--local-addr={HERE}"]
    options += [f"--signals-to-handle={LEFT_TO_TORCH}"]
    try:
        with TemporaryDirectory(prefix="stageline_") as logs, _stopped_by_signals(), _no_logs():
            run.main([*options, f"--log-dir={logs}", *command])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        raise StageError(
            f"rank {rank} of {name} {_end(failure.exitcode)}, and the others were stopped: what it "
            "said is above"
        ) from None
    except SignalException as error:
        raise Stopped(error.sigval) from None


def _end(code: int) -> str:
    """Say how a process ended, by what `subprocess` calls its return code."""
    if code >= 0:
        return f"ended with exit code {code}"
    names = {number.value: number.name for number in signal.Signals}
    return f"was killed by signal {-code} ({names.get(-code, 'unknown')})"


@contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """Raise `Stopped` for the first signal that asks to end, and ignore others from then on.

    Torch ends the processes with SIGTERM as the exception passes, and after 30 s with SIGKILL; a
    second exception would leave them behind. It would hand SIGINT on, and every rank would print a
    traceback. Outside of the main thread signals are not ours to handle.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, _: object) -> NoReturn:
        for each in SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        raise Stopped(number)

    before = {each: signal.signal(each, stop) for each in SIGNALS}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


@contextmanager
def _no_logs() -> Iterator[None]:
    """This process only waits for others: what torch logs of that is not the user's."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)


class Loopback(RendezvousHandler):
    """Where the processes of this machine find each other. State: the store of this start.

    Each start has a store of its own: with torchrun's for a given address and port, processes that
    are started again may still read where those before them could be reached.
    """

    def __init__(self, parameters: RendezvousParameters) -> None:
        self.run_id = parameters.run_id
        self.store: TCPStore | None = None

    def get_backend(self) -> str:
        return NAME

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        self.store = _store_on_loopback()
        return RendezvousInfo(self.store, 0, 1, RendezvousStoreInfo(HERE, self.store.port))

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
        listening.bind((HERE, 0))
        listening.listen()
        port = listening.getsockname()[1]
        return TCPStore(
            HERE,
            port,
            1,
            is_master=True,
            timeout=timedelta(minutes=5),
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )
