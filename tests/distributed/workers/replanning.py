"""Layers move between processes in the middle of training; held to a run in one process."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

import stageline as sl
from stageline.model.layers import Layer
from stageline.planning.profiling.profile_result import LayerCost, Measurement
from stageline.zoo.cases import grouped
from stageline.zoo.gpt import Head, loss

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda groups: SGD(groups, 0.1, momentum=0.9),
    "adamw": lambda groups: AdamW(groups, 1e-2),
}


def model() -> nn.Sequential:
    """Dropout, statistics with a counter, and weights of two layers: at the ends, and further in.

    The first stay where they are, the others are on one rank or on two.
    """
    torch.manual_seed(0)
    embedding = nn.Embedding(11, 8)
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.LayerNorm(8)) for _ in range(4)]
    blocks[3][0].weight = blocks[0][0].weight
    return nn.Sequential(embedding, *blocks, nn.BatchNorm1d(5), Head(embedding))


def groups_of(parameters: Any) -> list[dict[str, Any]]:
    """Vectors are not decayed, and learn faster; a rank may have none of one kind."""
    found = list(parameters)
    return [
        {"params": [p for p in found if p.ndim > 1]},
        {"params": [p for p in found if p.ndim == 1], "weight_decay": 0.0, "lr": 0.03},
    ]


class Run:
    """A pipeline with its optimizer, and a schedule of rates that holds on to the groups."""

    def __init__(self, made: nn.Module, optimizer: str, **options: Any) -> None:
        self.pipe = sl.Pipeline(made, loss, **grouped({"num_microbatches": 4} | options))
        self.optimizer = OPTIMIZERS[optimizer](groups_of(self.pipe.parameters()))
        self.rates = StepLR(self.optimizer, 2, 0.5)

    def train(self, steps: range, part: slice = slice(None)) -> None:
        """After the third step there is no update: its gradients wait for the fourth's."""
        for number in steps:
            generator = torch.Generator().manual_seed(number)
            x, y = torch.randint(0, 11, (2, 9, 5), generator=generator)
            assert self.pipe.step(x[part], y[part]).loss > 0
            if number != 2:
                self.pipe.clip_grad_norm_(0.5)
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.rates.step()

    def replan(self, slow: int) -> bool:
        """As if one rank were ten times as slow as the others; whether that made layers move."""
        times = [10.0 if rank == slow else 1.0 for rank in self.pipe.schedule.placement]
        timeline = sl.simulate(self.pipe.schedule, sl.Costs(times, times, times))
        held = [id(group) for group in self.optimizer.param_groups]
        found = self.pipe.replan(self.optimizer, [timeline])
        assert [id(group) for group in self.optimizer.param_groups] == held
        self.check_groups()
        return found.moves

    def check_groups(self) -> None:
        """What the optimizer has is what this process has, in the model's order."""
        own = groups_of(self.pipe.parameters())
        for group, wanted in zip(self.optimizer.param_groups, own, strict=True):
            assert len(group["params"]) == len(wanted["params"])
            assert all(a is b for a, b in zip(group["params"], wanted["params"], strict=True))
        held = {p for group in own for p in group["params"]}
        assert set(self.optimizer.state) <= held

    def tensors(self) -> dict[str, Tensor]:
        """What this process has, with what the optimizer keeps and the rate of each parameter."""
        found = {name: tensor.clone() for name, tensor in self.pipe.state_dict().items()}
        rates = {p: g["lr"] for g in self.optimizer.param_groups for p in g["params"]}
        for layer in self.pipe.layers:
            for name, parameter in layer.module.named_parameters():
                if parameter in rates:
                    found[f"{layer.name}.{name} rate"] = torch.tensor(rates[parameter])
                for key, tensor in self.optimizer.state.get(parameter, {}).items():
                    found[f"{layer.name}.{name} {key}"] = tensor.clone()
        return found


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    for name, tensor in found.items():
        assert torch.equal(tensor, wanted[name]), name


def parity(_: Path) -> None:
    """Layers go to and fro, between updates and with gradients that wait for one."""
    num_ranks = dist.get_world_size()
    pairs = {"sgd": ("1f1b", "zbv"), "adamw": ("interleaved_1f1b",)}
    for optimizer, schedules in pairs.items():
        alone = Run(model(), optimizer, num_ranks=1, backend="serial", num_microbatches=6)
        alone.train(range(7))
        for schedule in schedules:
            options = {"num_ranks": num_ranks, "schedule": schedule, "num_microbatches": 6}
            to_and_fro(Run(model(), optimizer, **options), alone.tensors())
    with torch.device("meta"):
        empty = model()
    to_and_fro(Run(empty, optimizer, init=filled, **options), alone.tensors())


def filled(layer: Layer) -> None:
    values = {each.name: each.module.state_dict() for each in sl.LayerSequence.of(model())}
    layer.module.load_state_dict(values[layer.name])


def to_and_fro(run: Run, wanted: dict[str, Tensor]) -> None:
    run.train(range(2))
    moves = [run.replan(slow=0)]
    run.train(range(2, 3))
    moves.append(run.replan(slow=dist.get_world_size() - 1))
    run.train(range(3, 5))
    moves.append(run.replan(slow=0))
    run.train(range(5, 7))
    assert sum(moves) > 1  # of six stages on three ranks the first may have one layer already
    assert_same(run.tensors(), wanted)
    run.pipe.close()


def saved(folder: Path) -> None:
    """After a replan; loaded again by processes with another balance, and by one."""
    num_ranks = dist.get_world_size()
    run = Run(model(), "adamw", num_ranks=num_ranks)
    run.train(range(2))
    assert run.replan(slow=0)
    sl.save(folder, run.pipe, run.optimizer, step=2)
    for backend in ("processes", "serial"):
        again = Run(model(), "adamw", num_ranks=num_ranks, backend=backend)
        sl.load(folder, again.pipe, again.optimizer)
        found, wanted = again.tensors(), run.tensors()
        assert_same({name: found[name] for name in found.keys() & wanted.keys()}, wanted)
        again.pipe.close()
    run.pipe.close()


def memory(_: Path) -> None:
    """What has left a rank is held by nobody there, and a model on meta stays on meta elsewhere."""
    with torch.device("meta"):
        layers = [nn.Linear(8, 8) for _ in range(6)]
    pipe = sl.Pipeline(layers, nn.functional.mse_loss, num_ranks=2, num_microbatches=4)
    optimizer = AdamW(pipe.parameters())
    pipe.step(torch.ones(8, 8), torch.zeros(8, 8))
    optimizer.step()
    rank, last = dist.get_rank(), layers[2]
    held = [last.weight, last.weight.grad, *optimizer.state[last.weight].values()]
    left = [weakref.ref(tensor) for tensor in held if rank == 0]
    del held
    times = sl.Costs([10.0, 1.0], [10.0, 1.0], [10.0, 1.0])
    assert pipe.replan(optimizer, [sl.simulate(pipe.schedule, times)]).moves
    assert all(reference() is None for reference in left)
    homes = zip(layers, pipe._session.assembly.layout.rank_of_layer, strict=True)
    assert all(layer.weight.is_meta == (home != rank) for layer, home in homes)
    assert last.weight.is_meta == (rank == 0)
    pipe.step(torch.ones(8, 8), torch.zeros(8, 8))
    optimizer.step()
    pipe.close()


class Slow(nn.Linear):
    """Takes three times as long on the second rank as on the first."""

    def forward(self, x: Tensor) -> Tensor:
        sleep(0.006 if dist.get_rank() == 1 else 0.002)
        return super().forward(x)


def device(_: Path) -> None:
    """Measured steps of a pipeline with a slow rank, and a profile of layers that are all alike."""
    pipe = sl.Pipeline(
        [Slow(4, 4) for _ in range(8)], nn.functional.mse_loss, num_ranks=2, num_microbatches=4
    )
    optimizer = SGD(pipe.parameters(), 0.1)
    timelines = []
    for _step in range(3):
        with pipe.trace() as trace:
            pipe.step(torch.ones(4, 4), torch.zeros(4, 4))
        timeline = trace.timeline
        timelines.append(timeline)
    same = LayerCost(1.0, 1.0, 1.0, 0, 0, 0, 0)
    names = tuple(layer.name for layer in pipe.layers)
    profile = sl.Profile(names, (Measurement(1, (same,) * 8, ()),))
    assert pipe.balance == (4, 4)
    assert pipe.replan(optimizer, timelines, profile).new_balance[0] > 4
    own = pipe.balance[dist.get_rank()]
    assert len(list(pipe.parameters())) == 2 * own
    pipe.close()


def replicas(_: Path) -> None:
    """Both of them move the same layers; the bits are those of replicas that moved none."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    part = slice(0, 5) if grid.get_local_rank("dp") == 0 else slice(5, 9)
    found = []
    for moves in (False, True):
        run = Run(model(), "adamw", num_ranks=2, num_microbatches=2, mesh=grid)
        run.train(range(3), part)
        assert not moves or run.replan(slow=1)
        run.train(range(3, 5), part)
        assert not moves or run.replan(slow=0)
        found.append(everywhere(run, grid["pp"].get_group()))
        run.pipe.close()
    assert_same(found[0], found[1])


def everywhere(run: Run, group: dist.ProcessGroup) -> dict[str, Tensor]:
    parts: list[dict[str, Tensor]] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(parts, run.tensors(), group)
    return {name: tensor for part in parts for name, tensor in part.items()}


def refused(_: Path) -> None:
    """What is wrong on one rank is told on all, and nothing moves."""
    rank = dist.get_rank()
    run = Run(model(), "adamw", num_ranks=2)
    times = sl.Costs([10.0, 1.0], [10.0, 1.0], [10.0, 1.0])
    timelines = [sl.simulate(run.pipe.schedule, times)]
    balance = run.pipe.balance
    with told("there is no timeline"):
        run.pipe.replan(run.optimizer, timelines if rank == 0 else [])
    with told("that the pipeline does not have"):
        other = SGD(model().parameters()) if rank == 1 else run.optimizer
        run.pipe.replan(other, timelines)
    with told("the optimizer has 1 groups, but 2 on another rank: make the same groups"):
        lone = AdamW(run.pipe.parameters(), 1e-2) if rank == 1 else run.optimizer
        run.pipe.replan(lone, timelines)
    with told("lr of the optimizer's group 1 is 0.5, but 0.03 on another rank"):
        run.optimizer.param_groups[1]["lr"] = 0.5 if rank == 1 else 0.03
        run.pipe.replan(run.optimizer, timelines)
    assert run.pipe.balance == balance
    run.train(range(3))
    run.pipe.close()
    without_optimizer(rank)
    in_parts()


def without_optimizer(rank: int) -> None:
    """What arrives needs one, that may have had nothing to do so far."""
    layers = [nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU()]
    sizes: dict[str, Any] = {"num_ranks": 2, "num_microbatches": 4}
    pipe = sl.Pipeline(layers, nn.functional.mse_loss, balance=[3, 1], **grouped(sizes))
    times = sl.Costs([10.0, 1.0], [10.0, 1.0], [10.0, 1.0])
    timelines = [sl.simulate(pipe.schedule, times)]
    with told("would move to a rank without an optimizer"):
        pipe.replan(SGD(pipe.parameters()) if rank == 0 else None, timelines)
    optimizer = SGD([{"params": pipe.parameters()}], 0.1)
    assert pipe.replan(optimizer, timelines).new_balance == (2, 2)
    pipe.step(torch.ones(4, 4), torch.ones(4, 4))
    optimizer.step()
    pipe.close()


def in_parts() -> None:
    """As tensor parallelism leaves them, if only among one process."""
    grid = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "tp"))
    layers = [nn.Linear(4, 4) for _ in range(4)]
    for layer in layers:
        parallelize_module(layer, grid["tp"], ColwiseParallel())
    pipe = sl.Pipeline(layers, nn.functional.mse_loss, num_ranks=2, num_microbatches=4, mesh=grid)
    times = sl.Costs([10.0, 1.0], [10.0, 1.0], [10.0, 1.0])
    with told("has a DTensor, but only whole tensors can move"):
        pipe.replan(SGD(pipe.parameters()), [sl.simulate(pipe.schedule, times)])
    pipe.close()


@contextmanager
def told(text: str) -> Iterator[None]:
    with pytest.raises(sl.PlanError) as error:
        yield
    assert text in str(error.value), error.value


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder = Path(sys.argv[1])
    tasks = {"parity": parity, "saved": saved, "memory": memory}
    tasks |= {"replicas": replicas, "refused": refused, "device": device}
    for task in sys.argv[2:]:
        tasks[task](folder)
        print(f"{task} is done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
