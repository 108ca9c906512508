"""Everything that a user may do while a save goes on in the background, with two pipelines at once.

The save is held up until all of it is done, so that they do overlap.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD

import stageline as sl
from stageline.checkpoint import save as save_module
from stageline.checkpoint import write_tensors
from stageline.errors import CheckpointError

X = torch.ones(4, 4)


class HeldUp:
    """A writer that waits for a sign. State: whether it came."""

    def __init__(self) -> None:
        self.may_go_on = Event()

    def before(self, write: Callable[..., Any]) -> Callable[..., Any]:
        def later(*args: Any) -> Any:
            assert self.may_go_on.wait(30)
            return write(*args)

        return later


def pipeline() -> tuple[sl.Pipeline, SGD]:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4) for _ in range(2)]
    pipe = sl.Pipeline(
        layers,
        nn.functional.mse_loss,
        num_ranks=2,
        num_microbatches=2,
        options=sl.Options(timeout=20.0),
    )
    return pipe, SGD(pipe.parameters(), 0.1)


def do_all(pipe: sl.Pipeline, optimizer: SGD, folder: Path) -> None:
    """Steps, late losses, norms, traces, outputs, a verification, reports and a checkpoint."""
    results = [pipe.step(X, X) for _ in range(3)]
    pipe.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    with pipe.trace() as trace:
        results.append(pipe.step(X, X))
    timeline = trace.timeline
    assert timeline.makespan > 0
    assert pipe.eval()(X).shape == (4, 4)
    pipe.train()
    pipe(X).sum().backward()
    pipe.verify(X, X)
    pipe.replan(optimizer, [timeline])
    reports = sl.fit(pipe, [(X, X)], optimizer, steps=4, report_every=1)
    assert len(reports) == 4
    losses = [float(result.loss) for result in results]
    assert losses == [losses[0]] * 3 + losses[3:]
    assert not folder.exists()


def overlap(folder: Path) -> None:
    pipe, optimizer = pipeline()
    other, its_optimizer = pipeline()
    held = HeldUp()
    with patch.object(save_module, "write_shard", held.before(write_tensors.write_shard)):
        first = sl.save(folder / "a", pipe, optimizer, step=1, wait=False)
        second = sl.save(folder / "b", other, its_optimizer, step=1, wait=False)
        do_all(pipe, optimizer, folder / "c")
        do_all(other, its_optimizer, folder / "c")
        assert not first.result.done()
        held.may_go_on.set()
    # the next ones wait for those under way
    saved = [sl.save(folder / "a", pipe, optimizer, step=n, wait=n == 4) for n in (2, 3, 4)]
    assert sl.load(folder / "a", pipe, optimizer).step == 4
    assert [each.wait().name for each in (first, *saved)] == [
        f"step-0000000{n}" for n in range(1, 5)
    ]
    sl.export(folder / "model.safetensors", pipe)
    sl.save(folder / "b", other, its_optimizer, step=2, wait=False)
    pipe.close()
    other.close()  # with a save under way, which is finished
    assert second.wait() == folder / "b" / "step-00000001"
    assert sl.latest(folder / "b") == folder / "b" / "step-00000002"


def fail(*_: Any) -> None:
    raise OSError(28, "No space left on device")


def after_a_failure(folder: Path) -> None:
    """A save that fails in the background is told once, and what follows is as before."""
    pipe, optimizer = pipeline()
    with patch.object(save_module, "write_shard", fail):
        sl.save(folder / "d", pipe, optimizer, step=1, wait=False)
        pipe.step(X, X)
        told = raised_by(partial(sl.save, folder / "d", pipe, optimizer, step=2))
        assert "No space left on device" in told, told
        assert "No space left" in told
    sl.save(folder / "d", pipe, optimizer, step=3)
    pipe.step(X, X)
    with patch.object(save_module, "write_shard", fail):
        sl.save(folder / "d", pipe, optimizer, step=4, wait=False)
        assert "No space left" in raised_by(pipe.close)
    assert "closed" in raised_by(partial(pipe.step, X, X))


def raised_by(act: Callable[[], Any]) -> str:
    try:
        act()
    except (CheckpointError, sl.ModelError) as error:
        return str(error)
    return "nothing"


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    overlap(Path(sys.argv[1]))
    after_a_failure(Path(sys.argv[1]))
    print("all is done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
