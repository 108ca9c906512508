"""Runs another worker with all its pipelines over ordered channels: their seed, its name, its arguments."""

from __future__ import annotations

import runpy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from tests.distributed.delays import delays

import stageline as sl


def main() -> None:
    seed, worker, *arguments = sys.argv[1:]
    make = sl.Pipeline.__init__

    def make_over_channels(
        pipe: sl.Pipeline, *args: Any, options: sl.Options | None = None, **others: Any
    ) -> None:
        backend = others.get("backend") or ("processes" if dist.is_initialized() else "threads")
        options = replace(options or sl.Options(), check_streams=backend == "processes")
        make(pipe, *args, options=options, **others)

    path = str(Path(__file__).parent / f"{worker}.py")
    sys.argv = [path, *arguments]
    with mock.patch.object(sl.Pipeline, "__init__", make_over_channels), delays(int(seed)):
        runpy.run_path(path, run_name="__main__")


if __name__ == "__main__":
    main()
