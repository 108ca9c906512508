"""Saves or loads in a group of processes, and holds what follows to a run that never stopped."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import AdamW
from torch.optim.lr_scheduler import MultiStepLR

import stageline as sl
from stageline.checkpoint import record_file
from stageline.checkpoint.pipeline_state import schedulers_of
from stageline.zoo.cases import grouped
from stageline.zoo.gpt import Head, loss

UNEVEN = [2, 1, 8, 1]  # the second rank has nothing but dropout, and so no optimizer


def model(width: int = 8) -> nn.Sequential:
    """Tied weights on the first and the last rank, dropout, and statistics with a counter."""
    torch.manual_seed(0)
    embedding = nn.Embedding(11, width)
    blocks = [
        nn.Sequential(nn.Linear(width, width), nn.Dropout(0.1), nn.LayerNorm(width))
        for _ in range(3)
    ]
    return nn.Sequential(embedding, *blocks, nn.BatchNorm1d(5), Head(embedding))


def pipeline(made: nn.Module, num_ranks: int, **options: Any) -> tuple[sl.Pipeline, AdamW | None]:
    options = {"num_microbatches": 4} | options
    pipe = sl.Pipeline(made, loss, num_ranks=num_ranks, **grouped(options))
    has_weights = any(True for _ in pipe.parameters())
    return pipe, AdamW(pipe.parameters(), 1e-2) if has_weights else None


def train(pipe: sl.Pipeline, optimizer: AdamW | None, steps: range, part: slice = slice(9)) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randint(0, 11, (2, 9, 5), generator=generator)
        result = pipe.step(x[part], y[part])
        assert result.loss > 0  # also waits for it, so that none is on its way at the end
        pipe.clip_grad_norm_(0.5)
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()


def whole(tensor: Tensor) -> Tensor:
    found: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found


def tensors(pipe: sl.Pipeline, optimizer: AdamW | None) -> dict[str, Tensor]:
    """What this process has, with the optimizer's moments by the names of their parameters."""
    found = {name: whole(tensor).clone() for name, tensor in pipe.state_dict().items()}
    for layer in pipe.layers:
        for name, parameter in layer.module.named_parameters():
            state = optimizer.state.get(parameter, {}) if optimizer else {}
            for key, tensor in state.items():
                found[f"{layer.name}.{name} {key}"] = whole(tensor).clone()
    return found


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    for name, tensor in found.items():
        assert torch.equal(tensor, wanted[name]), name


def unstopped(num_steps: int) -> dict[str, Tensor]:
    pipe, optimizer = pipeline(model(), 1, backend="serial")
    train(pipe, optimizer, range(num_steps))
    return tensors(pipe, optimizer)


def save(folder: Path) -> None:
    """On four ranks, in the background of training; then failures, and the model for others."""
    pipe, optimizer = pipeline(model(), 4, balance=UNEVEN)
    train(pipe, optimizer, range(3))
    saving = sl.save(folder, pipe, optimizer, step=3, data={"seen": 27}, wait=False)
    train(pipe, optimizer, range(3, 8))
    assert saving.wait() == folder / "step-00000003"
    assert_same(tensors(pipe, optimizer), unstopped(8))
    sl.export(folder / "model.safetensors", pipe)

    is_full = dist.get_rank() == 2
    with full_disk(is_full), refused("" if is_full else "rank 2: ", "No space left on device"):
        sl.save(folder, pipe, optimizer, step=8)
    with refused("list" if dist.get_rank() == 0 else "rank 0: the optimizer keeps 'history'"):
        odd = odd_optimizer(pipe) if dist.get_rank() == 0 else optimizer
        sl.save(folder, pipe, odd, step=8)
    wide, other = pipeline(model(width=6), 4)
    before = tensors(wide, other)
    with refused("0.weight is float32 (11, 8) instead of float32 (11, 6)"):
        sl.load(folder, wide, other)
    assert_same(tensors(wide, other), before)
    wide.close()
    pipe.close()


def odd_optimizer(pipe: sl.Pipeline) -> AdamW:
    odd = AdamW(pipe.parameters())
    odd.state[next(pipe.parameters())]["history"] = []
    return odd


@contextmanager
def full_disk(is_full: bool) -> Iterator[None]:
    def write(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        if is_full:
            patch.setattr("stageline.checkpoint.save.write_shard", write)
        yield


@contextmanager
def refused(*texts: str) -> Iterator[None]:
    with pytest.raises(sl.CheckpointError) as told:
        yield
    assert all(text in str(told.value) for text in texts), told.value


def load(folder: Path) -> None:
    """On as many ranks as there are, with a model that has weights and with one that has none."""
    num_ranks = dist.get_world_size()
    wanted = unstopped(8)
    with torch.device("meta"):
        empty = model()
    for made, options in ((model(), {}), (empty, {"init_fn": lambda _: None})):
        pipe, optimizer = pipeline(made, num_ranks, seed=9, **options)
        assert sl.load(folder, pipe, optimizer) == (3, {"seen": 27})
        train(pipe, optimizer, range(3, 8))
        assert_same(tensors(pipe, optimizer), wanted)
        sl.export(folder / f"model-{num_ranks}.safetensors", pipe)
        pipe.close()


def load_replicas(folder: Path) -> None:
    """On two replicas of two ranks, with the micro-batches of one pipeline shared between them.

    Gradients are those of two halves, added: another order, so the last bits may differ. All else,
    randomness and BatchNorm's statistics too, is as if there were one pipeline.
    """
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    wanted = unstopped(8)
    pipe, optimizer = pipeline(model(), 2, num_microbatches=2, mesh=grid)
    assert sl.load(folder, pipe, optimizer).step == 3
    part = slice(0, 5) if grid.get_local_rank("dp") == 0 else slice(5, 9)
    train(pipe, optimizer, range(3, 8), part)
    found = tensors(pipe, optimizer)
    apart = {
        name: float((tensor - wanted[name]).abs().max())
        for name, tensor in found.items()
        # Head's LayerNorm takes out what these two add: their gradients are rounding, which AdamW
        # makes large
        if not name.startswith(("4.weight", "4.bias"))
    }
    worst = max(apart.values())
    assert worst < 1e-6, apart
    print(f"apart by {worst:.1e} after 5 steps on two replicas")
    again = unchanged_by_a_stop(folder / "again", pipe, optimizer, part)
    assert_same(tensors(*again), tensors(pipe, optimizer))
    pipe.close()
    again[0].close()


def unchanged_by_a_stop(
    folder: Path, pipe: sl.Pipeline, optimizer: AdamW | None, part: slice
) -> tuple[sl.Pipeline, AdamW | None]:
    """Five more steps, and the same five of another pipeline that was loaded before them."""
    sl.save(folder, pipe, optimizer, step=8)
    train(pipe, optimizer, range(8, 13), part)
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    other, its_optimizer = pipeline(model(), 2, num_microbatches=2, mesh=grid)
    sl.load(folder, other, its_optimizer)
    train(other, its_optimizer, range(8, 13), part)
    return other, its_optimizer


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.down(torch.relu(self.up(x)))
        return x + added


def mlps() -> nn.Sequential:
    torch.manual_seed(0)
    embedding = nn.Embedding(11, 8)
    return nn.Sequential(embedding, Mlp(), Mlp(), Head(embedding))


def mesh(folder: Path) -> None:
    """With two replicas, and with weights that two processes hold in halves, both ways."""
    for name in ("dp", "tp"):
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", name))
        made = mlps()
        if name == "tp":
            for block in (made[1], made[2]):
                plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
                parallelize_module(block, grid["tp"], plan)
        pipe, optimizer = pipeline(made, 2, mesh=grid)
        train(pipe, optimizer, range(2))
        wanted = tensors(pipe, optimizer)
        sl.save(folder / name, pipe, optimizer, step=2)
        sl.export(folder / f"{name}.safetensors", pipe)
        train(pipe, optimizer, range(2, 3))
        sl.load(folder / name, pipe, optimizer)
        assert_same(tensors(pipe, optimizer), wanted)
        alone, other = pipeline(mlps(), 3, backend="serial")
        sl.load(folder / name, alone, other)
        assert_same(wanted, tensors(alone, other))
        pipe.close()


def damaged(folder: Path) -> None:
    """Whatever is wrong, and whoever sees it: all ranks refuse, and none has changed anything."""
    rank = dist.get_rank()
    owned = {"optimizer": lambda w: AdamW(w, 1e-2), "scheduler": lambda o: MultiStepLR(o, [2, 4])}
    for name, options in (("given", {}), ("owned", owned)):
        pipe, optimizer = pipeline(model(), 2, **options)
        optimizer = None if options else optimizer
        train(pipe, optimizer, range(2))
        sl.save(folder / name, pipe, optimizer, step=2)
        saved = everything(pipe, optimizer)
        train(pipe, optimizer, range(2, 4))
        before = everything(pipe, optimizer)
        whole, here = folder / name / "step-00000002", folder / f"{name}-damaged"
        for harm, text in HARM:
            if rank == 0:
                shutil.rmtree(here, ignore_errors=True)
                shutil.copytree(whole, here)
                harm(here)
            dist.barrier()
            with refused(text):
                sl.load(here, pipe, optimizer)
            assert_equal(everything(pipe, optimizer), before)
        with failing_read(rank == 1), refused("" if rank else "rank 1: ", "Input/output error"):
            sl.load(whole, pipe, optimizer)
        assert_equal(everything(pipe, optimizer), before)
        sl.load(whole, pipe, optimizer)
        assert_equal(everything(pipe, optimizer), saved)
        pipe.close()


def everything(pipe: sl.Pipeline, optimizer: AdamW | None) -> dict[str, Any]:
    """Return copies of all that a load may change in this process."""
    found: dict[str, Any] = {name: t.clone() for name, t in pipe.state_dict().items()}
    found |= {"random": torch.get_rng_state(), "counts": [pipe.num_steps, pipe._session.seed]}
    for number, each in enumerate(pipe.optimizers if optimizer is None else (optimizer,)):
        state = deepcopy(each.state_dict())
        found |= {f"{number} {i}": group for i, group in enumerate(state["param_groups"])}
        for index, kept in state["state"].items():
            found |= {f"{number} {index} {key}": value for key, value in kept.items()}
    for scheduler in schedulers_of(pipe):
        found["scheduler"] = deepcopy(scheduler.state_dict())
    return found


def assert_equal(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        is_equal = torch.equal(value, wanted[name]) if isinstance(value, Tensor) else None
        assert is_equal or value == wanted[name], name


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def without_counts(path: Path) -> None:
    fields = record_file.read_record(path) | {"num_steps": None}
    (path / "checkpoint.json").write_bytes(record_file.record_text(fields))


HARM = (
    (
        lambda path: flip(path / "shard-00001.safetensors", 30),
        "checksum of its header does not match",
    ),
    (lambda path: flip(path / "shard-00002.safetensors", -20), "the checksum of bytes"),
    (lambda path: flip(path / "checkpoint.json", -40), "its checksum does not match"),
    (lambda path: (path / "shard-00002.safetensors").unlink(), "No such file"),
    (lambda path: (path / "checkpoint.json").unlink(), "has no checkpoint"),
    (without_counts, "its field num_steps is invalid"),
)


@contextmanager
def failing_read(is_failing: bool) -> Iterator[None]:
    def read(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    with pytest.MonkeyPatch.context() as patch:
        if is_failing:
            patch.setattr("stageline.checkpoint.read_tensors._read", read)
        yield


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder = Path(sys.argv[1])
    for task in sys.argv[2:]:
        tasks = {"save": save, "load": load, "mesh": mesh, "replicas": load_replicas}
        (tasks | {"damaged": damaged})[task](folder)
        print(f"{task} is done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
