"""The circumstances that times depend on, stored beside them."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

ALLOCATOR = ("MALLOC_", "LD_PRELOAD", "GLIBC_TUNABLES", "PYTHONMALLOC")
THREADS = ("OMP_", "MKL_", "GOMP_")


def machine() -> dict[str, Any]:
    """Return versions, cores, threads, what is set of allocator and threads, load and date."""
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "torchgpipe": metadata.version("torchgpipe"),
        "libc": " ".join(platform.libc_ver()),
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "allocator": environment(ALLOCATOR) or "default of libc",
        "thread settings": environment(THREADS),
        "load": round(os.getloadavg()[0], 2),  # of others too: 0 on a quiet machine
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
    }


def environment(prefixes: tuple[str, ...]) -> dict[str, str]:
    """Return the environment's variables whose names begin so."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(prefixes)}


def processor() -> str:
    """Return the name of the processor, where the operating system says it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.machine()
