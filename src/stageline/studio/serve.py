"""Start the studio on the loopback interface, with a random token in its address."""

from __future__ import annotations

import os
import secrets
import socket
from pathlib import Path

import uvicorn

from stageline.errors import ReportError
from stageline.studio.app import create_app

HOST = "127.0.0.1"  # never another interface: the studio has no other protection than its token
TOKEN_BYTES = 16


class Studio:
    """A server that accepts connections from this machine. State: its socket, and if it runs."""

    def __init__(self, runs_folder: Path, port: int) -> None:
        """Listen on a port, 0 for any free one; raise `ReportError` if that is not possible."""
        self.token = secrets.token_hex(TOKEN_BYTES)
        try:
            self.listener = socket.create_server((HOST, port))
        except OSError as error:
            reason = (os.strerror(error.errno) if error.errno else str(error)).lower()
            raise ReportError(
                f"port is {port}, which cannot be listened on ({reason}): use another one, or 0 "
                "for any that is free"
            ) from None
        config = uvicorn.Config(
            create_app(self.token, runs_folder),
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=1,
        )
        self.server = uvicorn.Server(config)

    @property
    def address(self) -> str:
        """Return the address of the first page; requests to it wait until `run` is called."""
        return f"http://{HOST}:{self.listener.getsockname()[1]}/{self.token}/"

    def run(self) -> None:
        """Answer requests until `stop` is called, or Ctrl-C raises `KeyboardInterrupt`."""
        with self.listener:
            self.server.run(sockets=[self.listener])

    def stop(self) -> None:
        """End `run`, which another thread is in."""
        self.server.should_exit = True
