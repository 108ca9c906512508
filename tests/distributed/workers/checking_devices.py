"""Runs examples/check_devices.py as one of several processes; the argument is its report."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import typer
from examples.check_devices import main

if __name__ == "__main__":
    os.environ.setdefault("LOCAL_RANK", os.environ["RANK"])
    try:
        main(quick=True, sanitizer=False, report=Path(sys.argv[1]))
    except typer.Exit as end:
        sys.exit(end.exit_code)
