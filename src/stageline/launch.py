"""A script or module as several processes on this machine: torchrun, listening on loopback only."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore, run  # type: ignore[attr-defined]  # it is in the docs
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

HERE, NAME = "127.0.0.1", "stageline"


def launch(script: Path, arguments: Sequence[str], ranks: int, max_restarts: int = 0) -> None:
    """Until all processes have ended; raises `StageError` if one of them failed."""
    check_size("ranks", ranks)
    if not script.is_file():
        raise ModelError(f"{script} is not there, but has to be a Python script")
    _launch(str(script), [str(script), *arguments], ranks, max_restarts)


def launch_module(module: str, arguments: Sequence[str], ranks: int) -> None:
    """The same for what `python -m` runs."""
    check_size("ranks", ranks)
    _launch(module, ["--module", module, *arguments], ranks)


def _launch(name: str, command: Sequence[str], ranks: int, max_restarts: int = 0) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does, but with no warning
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    rendezvous_handler_registry.register(NAME, Loopback)
    options = [f"--nproc-per-node={ranks}", f"--max-restarts={max_restarts}"]
    options += [f"--rdzv-backend={NAME}", f"--rdzv-endpoint={HERE}:0", f"--local-addr={HERE}"]
    try:
        run.main([*options, *command])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        raise StageError(
            f"rank {rank} of {name} ended with exit code {failure.exitcode}, and the others were "
            "stopped: what it said is above"
        ) from None


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
