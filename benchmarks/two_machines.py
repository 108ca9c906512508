"""Two "machines": network namespaces joined by a cable, torchrun on both. Needs root and iproute2.

    python benchmarks/two_machines.py

First all schedules train to the bits of one process over that cable; then it is pulled out, and
both sides have to say so.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic

WORKERS = Path(__file__).parents[1] / "tests" / "distributed" / "workers"
MACHINES = ("stageline-a", "stageline-b")
ENDS = ("stageline-va", "stageline-vb")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
PORT = 29400


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


@contextmanager
def cable() -> Iterator[None]:
    """Two namespaces with an end of the cable in each; all gone afterwards."""
    try:
        for machine in MACHINES:
            ip("netns", "add", machine)
        ip("link", "add", ENDS[0], "type", "veth", "peer", "name", ENDS[1])
        for machine, end, address in zip(MACHINES, ENDS, ADDRESSES, strict=True):
            ip("link", "set", end, "netns", machine)
            ip("-n", machine, "addr", "add", f"{address}/24", "dev", end)
            ip("-n", machine, "link", "set", end, "up")
            ip("-n", machine, "link", "set", "lo", "up")
        yield
    finally:
        for machine in MACHINES:
            subprocess.run(["ip", "netns", "del", machine], check=False)


def start(worker: str) -> list[subprocess.Popen[str]]:
    """One process on each machine."""
    processes = []
    for number, (machine, end) in enumerate(zip(MACHINES, ENDS, strict=True)):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2"]
        torchrun += [f"--node-rank={number}", "--nproc-per-node=1", f"--master-port={PORT}"]
        torchrun += [f"--master-addr={ADDRESSES[0]}", str(WORKERS / f"{worker}.py")]
        processes.append(
            subprocess.Popen(
                ["ip", "netns", "exec", machine, *torchrun],
                env=os.environ | {"GLOO_SOCKET_IFNAME": end, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    return processes


def same_bits() -> bool:
    outputs = [process.communicate(timeout=300)[0] for process in start("schedules")]
    print("schedules over the cable:", *(line for o in outputs for line in o.splitlines()[-1:]))
    return all("14 schedules equal" in output for output in outputs)


def pulled_out() -> bool:
    """The link goes down in the middle of training."""
    processes = start("endless")
    for process in processes:
        assert process.stdout is not None
        next(line for line in process.stdout if "step 20" in line)
    ip("-n", MACHINES[0], "link", "set", ENDS[0], "down")
    pulled = monotonic()
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    print(f"both ended {monotonic() - pulled:.1f} s after the cable was pulled out:")
    errors = [_error(output) for output in outputs]
    for machine, error in zip(MACHINES, errors, strict=True):
        print(f"{machine}: {error}")
    return all(errors) and all(process.returncode for process in processes)


def _error(output: str) -> str:
    """The last lines of the rank's own traceback."""
    lines = [line for line in output.splitlines() if line.startswith("[rank")]
    start = next((i for i, line in enumerate(lines) if "StageError" in line), len(lines))
    return "\n".join(lines[start:])


if __name__ == "__main__":
    with cable():
        is_good = same_bits() and pulled_out()
    raise SystemExit(not is_good)
