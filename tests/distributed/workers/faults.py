"""One rank of three meets with a fault: where, of which kind and on which rank, arguments say.

When that was is written to a file, and when each of the ranks has ended.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import SGD

import stageline as sl
from stageline.checkpoint import load as load_module
from stageline.checkpoint import save as save_module
from stageline.runtime.backends.processes import failure_watch
from stageline.runtime.backends.processes import groups as mesh
from stageline.training import metrics

KINDS = ("raise", "SIGKILL", "SIGSTOP", "exit")
TIMEOUT, START_UP = 5.0, 10.0
X = torch.ones(8, 4)


class Fault:
    """Strikes when it is called for the `count`-th time. State: how often that will be.

    Of a kind that is none of `KINDS`, it never does.
    """

    def __init__(self, kind: str, path: Path, count: int = 1) -> None:
        self.kind, self.path, self.count = kind, path, count

    def __call__(self) -> None:
        self.count -= 1
        if self.count == 0 and self.kind in KINDS:
            self.path.write_text(repr(time.time()))
            if self.kind == "raise":
                raise ValueError("a fault of the user's own")
            if self.kind == "exit":
                raise SystemExit(0)
            os.kill(os.getpid(), signal.Signals[self.kind])

    def before(self, act: Callable[..., Any]) -> Callable[..., Any]:
        """The same with the fault in front of it."""

        def struck(*args: Any, **named: Any) -> Any:
            self()
            return act(*args, **named)

        return struck


class Struck(nn.Module):
    """A layer that has a fault."""

    def __init__(self, fault: Callable[[], None]) -> None:
        super().__init__()
        self.linear, self.fault = nn.Linear(4, 4), fault

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(x, FakeTensor):  # all ranks run all layers without data
            self.fault()
        found: Tensor = self.linear(x)
        return found


def pipeline(fault: Callable[[], None] = lambda: None) -> sl.Pipeline:
    """The fault is in the layer of this rank."""
    return sl.Pipeline(
        [Struck(fault) for _ in range(3)],
        nn.functional.mse_loss,
        num_ranks=3,
        num_microbatches=2,
        balance=[1, 1, 1],
        options=sl.Options(timeout=TIMEOUT),
    )


def trained() -> tuple[sl.Pipeline, SGD]:
    pipe = pipeline()
    optimizer = SGD(pipe.parameters(), 0.1)
    step(pipe, 2)
    return pipe, optimizer


def step(pipe: sl.Pipeline, count: int) -> None:
    for _ in range(count):
        assert pipe.step(X, X).loss > 0


def in_step(fault: Fault, _: Path) -> None:
    fault.count = 5
    step(pipeline(fault), 4)


def in_evaluation(fault: Fault, _: Path) -> None:
    fault.count = 5
    pipe = pipeline(fault)
    step(pipe, 2)
    pipe.eval()(X)
    pipe(X)


def in_save(fault: Fault, folder: Path) -> None:
    pipe, optimizer = trained()
    patched(save_module, "write_shard", fault)
    sl.save(folder, pipe, optimizer, step=2)
    step(pipe, 1)


def before_save(fault: Fault, folder: Path) -> None:
    pipe, optimizer = trained()
    fault()
    sl.save(folder, pipe, optimizer, step=2)
    step(pipe, 1)


def in_background_save(fault: Fault, folder: Path) -> None:
    pipe, optimizer = trained()
    if fault.kind != "exit":  # of the thread alone, that is no end
        patched(save_module, "write_shard", fault)
    saving = sl.save(folder, pipe, optimizer, step=2, wait=False)
    if fault.kind == "exit":
        fault()
    step(pipe, 2)
    saving.wait()


def in_load(fault: Fault, folder: Path) -> None:
    pipe, optimizer = trained()
    sl.save(folder, pipe, optimizer, step=2)
    patched(load_module, "_prepare", fault)
    sl.load(folder, pipe, optimizer)
    step(pipe, 1)


def in_report(fault: Fault, _: Path) -> None:
    pipe = pipeline()
    patched(metrics, "peak_memory", fault)
    sl.fit(pipe, [(X, X)] * 4, SGD(pipe.parameters(), 0.1), steps=4, report_every=2)


def in_loader(fault: Fault, _: Path) -> None:
    fault.count = 3

    def loader() -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            fault()
            yield X, X

    pipe = pipeline()
    sl.fit(pipe, loader(), SGD(pipe.parameters(), 0.1), steps=6)


def in_loop(fault: Fault, _: Path) -> None:
    pipe = pipeline()
    step(pipe, 1)
    fault()
    step(pipe, 1)


def in_stream(fault: Fault, _: Path) -> None:
    fault.count = 3

    def loader() -> Iterator[tuple[Tensor, Tensor]]:
        for _step in range(6):
            fault()
            yield X, X

    pipe = sl.Pipeline(
        [nn.Linear(4, 4) for _ in range(3)],
        nn.functional.mse_loss,
        num_ranks=3,
        num_microbatches=2,
        optimizer_fn=partial(SGD, lr=0.1),
        options=sl.Options(timeout=TIMEOUT),
    )
    for result in pipe.run(loader()):
        assert result.loss > 0


def before_pipeline(fault: Fault, _: Path) -> None:
    """Who is not there yet is waited for longer; here not for five minutes."""
    for module in (mesh, failure_watch):
        patch.object(module, "START_UP_TIMEOUT", START_UP).start()
    getattr(sl, "Pipeline")  # noqa: B009  it is imported now, so that all are equally far
    dist.barrier()
    fault()
    step(pipeline(), 1)


def before_first_step(fault: Fault, _: Path) -> None:
    pipe = pipeline()
    fault()
    step(pipe, 1)


PLACES: dict[str, Callable[[Fault, Path], None]] = {
    "start-up, before the pipeline is made": before_pipeline,
    "start-up, before the first step": before_first_step,
    "step": in_step,
    "evaluation": in_evaluation,
    "save": in_save,
    "before a save": before_save,
    "background save": in_background_save,
    "load": in_load,
    "report": in_report,
    "loader": in_loader,
    "loader of a stream": in_stream,
    "loop of the user": in_loop,
}


def patched(owner: Any, name: str, fault: Fault) -> None:
    patch.object(owner, name, fault.before(getattr(owner, name))).start()


def main() -> None:
    place, kind, culprit, folder = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    # the first to be registered is the last to run, when all that is Stageline's has ended
    ended = Path(folder) / f"ended-{dist.get_rank()}"
    atexit.register(lambda: ended.write_text(repr(time.time())))
    is_struck = dist.get_rank() == int(culprit)
    fault = Fault(kind, Path(folder) / "struck", 1)
    PLACES[place](fault if is_struck else Fault("none", Path()), Path(folder) / "saved")
    print("reached its end")


if __name__ == "__main__":
    main()
