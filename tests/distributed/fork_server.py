"""Fork processes that run worker scripts, so that torch is imported once and not for every rank.

Started as a script, with a folder and the name of its socket there; the script ends when the server
listens, which goes on in the background. Each connection asks for one
process, by a line of JSON that comes with the file for its output:

    {"script": "…/workers/mesh.py", "arguments": ["dp,pp"], "environment": {"RANK": "0", …}}

The answers are a line with the process id, and one with the exit code when the process has ended.
A process is killed when its connection closes first. The server ends when its owner does: when
nobody has the folder's named pipe `owner` open for writing.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from contextlib import suppress
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

LONGEST_REQUEST = 2**16
# Modules that workers import, or a first step does: 4 s of processor time.
PRELOADED = (
    *("pytest", "safetensors.torch", "torch.distributed.tensor.parallel", "torch.utils.data"),
    *("torch._dynamo", "torch.fx.experimental.symbolic_shapes"),
)


def preload() -> None:
    for name in PRELOADED:
        importlib.import_module(name)
    stageline = importlib.import_module("stageline")
    for name in stageline.__all__:
        getattr(stageline, name)


def serve(folder: Path, name: str) -> dict[str, Any] | None:
    """Return a request in the new process it asks for, and None in the server at its end."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / f"{name}.new"))
    listener.listen(64)
    (folder / f"{name}.new").rename(folder / name)
    if os.fork():
        os._exit(0)  # tells who waits for this process that the server listens
    owner = os.open(folder / "owner", os.O_RDONLY | os.O_NONBLOCK)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # leaves no zombies of `attend`
    while True:
        ready, _, _ = select.select([listener.fileno(), owner], [], [])
        if owner in ready:
            return None
        connection, _ = listener.accept()
        if not os.fork():
            listener.close()
            os.close(owner)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return attend(connection)
        connection.close()


def attend(connection: socket.socket) -> dict[str, Any]:
    """Return the request in the process it asks for; its parent waits for that, and ends here."""
    line, (output,), _, _ = socket.recv_fds(connection, LONGEST_REQUEST, 1)
    request: dict[str, Any] = json.loads(line)
    process = os.fork()
    if not process:
        connection.close()
        os.setpgid(0, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        return request
    with suppress(OSError):  # whichever of the two is first; whoever kills it knows the group
        os.setpgid(process, process)
    connection.sendall(f"{process}\n".encode())
    ended = os.pidfd_open(process)
    ready, _, _ = select.select([ended, connection.fileno()], [], [])
    if ended not in ready:
        os.killpg(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    if ended in ready:
        connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def run(request: dict[str, Any]) -> None:
    """Run the script as if the interpreter had been started with it."""
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    os.environ |= request["environment"]
    script = request["script"]
    sys.argv = [script, *request["arguments"]]
    sys.path[0] = str(Path(script).parent)
    spec = spec_from_file_location("__main__", script)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules["__main__"] = module
    spec.loader.exec_module(module)


def main() -> None:
    preload()
    gc.collect()
    # An interpreter looks for cycles when it ends. In what was imported that takes 1 s, and copies
    # the pages that processes share.
    gc.freeze()
    request = serve(Path(sys.argv[1]), sys.argv[2])
    if request is not None:
        run(request)


if __name__ == "__main__":
    main()
