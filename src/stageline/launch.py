"""Run a script as several processes on this machine: torchrun, listening on loopback only."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore, run  # type: ignore[attr-defined]  # it is in the docs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from stageline.arguments import check_size
from stageline.errors import ModelError, StageError

HERE = "127.0.0.1"


def launch(script: Path, arguments: Sequence[str], ranks: int, max_restarts: int = 0) -> None:
    """Until all processes have ended; raises `StageError` if one of them failed."""
    check_size("ranks", ranks)
    if not script.is_file():
        raise ModelError(f"{script} is not there, but has to be a Python script")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does, but with no warning
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = _store_on_loopback()
    options = [f"--nproc-per-node={ranks}", f"--max-restarts={max_restarts}"]
    options += [f"--master-addr={HERE}", f"--master-port={store.port}", f"--local-addr={HERE}"]
    try:
        run.main([*options, str(script), *arguments])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        raise StageError(
            f"rank {rank} of {script} ended with exit code {failure.exitcode}, and the others were "
            "stopped: what it said is above"
        ) from None


def _store_on_loopback() -> TCPStore:
    """torchrun makes a store for the same port, and torch gives it this one's server."""
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
            multi_tenant=True,
            master_listen_fd=listening.detach(),
        )
