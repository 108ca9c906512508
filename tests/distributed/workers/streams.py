"""Streams over processes: the bits of the plain program, wherever they end.

At the end a stream of threads is left open, which must not keep the process from ending.
"""

from __future__ import annotations

import math
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

import stageline as sl
from stageline.model.layers import LayerSequence
from stageline.runtime.batches.result import StepResult
from stageline.runtime.batches.stream_results import StepResults
from stageline.zoo.cases import grouped
from stageline.zoo.plain_asynchronous import train_asynchronously

Weights = list[nn.Parameter]
Batch = tuple[Tensor, Tensor]
SCHEDULES: dict[str, dict[str, Any]] = {
    "pipedream": {"schedule": "pipedream"},
    "vertical_sync": {"schedule": "pipedream", "vertical_sync": True},
    "pipedream_2bw": {"schedule": "pipedream_2bw"},
}
BALANCES = {1: [8], 2: [3, 5], 3: [2, 4, 2], 4: [2, 2, 2, 2]}  # by number of stages
REPLICAS: dict[int, list[tuple[str, list[int]]]] = {  # by number of ranks
    2: [("pipedream_2bw", [2])],
    3: [("pipedream", [2, 1]), ("pipedream", [1, 2]), ("pipedream_2bw", [2, 1])],
    4: [("pipedream", [3, 1]), ("vertical_sync", [1, 2, 1])],
}
SEED = 5


def model() -> LayerSequence:
    torch.manual_seed(1)
    return LayerSequence.of(
        [
            *(nn.Linear(6, 8), nn.BatchNorm1d(5), nn.Linear(8, 8), nn.BatchNorm1d(5)),
            *(nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 8), nn.Linear(8, 3)),
        ]
    )


def batches(*lengths: int) -> list[Batch]:
    torch.manual_seed(2)
    return [(torch.randn(length, 5, 6), torch.randn(length, 5, 3)) for length in lengths]


def momentum(weights: Weights) -> Optimizer:
    return SGD(weights, 0.02, momentum=0.9, weight_decay=0.1)


def adamw(weights: Weights) -> Optimizer:
    return AdamW(weights, 1e-2)


def warm_up(optimizer: Optimizer) -> LRScheduler:
    return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))


class Careful(SGD):
    """Leaves a step out if a gradient is not finite: for the plain program."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]  # none is used
        weights = (weight for group in self.param_groups for weight in group["params"])
        if all(weight.grad.isfinite().all() for weight in weights if weight.grad is not None):
            super().step(closure)


def careful(weights: Weights) -> Optimizer:
    return Careful(weights, 0.02, momentum=0.9, weight_decay=0.1)


class Trained(NamedTuple):
    """What a stream left behind, and how to come by what it should have."""

    what: str
    tensors: dict[str, Tensor]
    losses: list[float]
    plain: Callable[[], tuple[dict[str, Tensor], list[float]]]


def plainly(data: list[Batch], make: Any, **options: Any) -> tuple[dict[str, Tensor], list[float]]:
    layers = model()
    losses = train_asynchronously(layers, mse_loss, make, data, seed=SEED, **options)
    return layers.state_dict(), losses


def check(streams: list[Trained]) -> None:
    """Each process runs some of the plain programs, for all of them."""
    rank, count = dist.get_rank(), dist.get_world_size()
    own = {number: streams[number].plain() for number in range(rank, len(streams), count)}
    everywhere = [own] * count
    dist.all_gather_object(everywhere, own)
    for number, stream in enumerate(streams):
        tensors, losses = everywhere[number % count][number]
        assert stream.tensors, stream.what
        for name, tensor in stream.tensors.items():
            assert torch.equal(tensor, tensors[name]), f"{stream.what}: {name}"
        for one, other in zip(stream.losses, losses, strict=False):  # who leaves a stream has fewer
            assert math.isclose(one, other, rel_tol=1e-5), f"{stream.what}: {one}, not {other}"


def build(rule: str, **options: Any) -> sl.Pipeline:
    options |= {"num_ranks": dist.get_world_size(), "seed": SEED, "timeout": 20.0}
    return sl.Pipeline(model(), mse_loss, **grouped(options | SCHEDULES[rule]))


def whole_streams(num_ranks: int) -> Iterator[Trained]:
    """Twenty micro-batches, short mini-batches among them; and stages on several ranks."""
    cases: list[tuple[str, int, Any, str, list[int] | None]] = [
        ("pipedream", 1, momentum, "never", None),
        ("vertical_sync", 4, adamw, "always", None),
        ("pipedream_2bw", 4, momentum, "except_last", None),
    ]
    for rule, replicas in REPLICAS[num_ranks]:
        size = 2 * max(replicas) if rule == "pipedream_2bw" else max(replicas)
        cases.append((rule, size, momentum, "never", replicas))
    for rule, size, make, recompute, on in cases:
        lengths = [2 * size] * (20 // size)
        if size > 1:
            lengths[1:3] = 2 * size - 1, 1
        data = batches(*lengths)
        num_stages = len(on or [1] * num_ranks)
        shared: dict[str, Any] = {"num_microbatches": size, "replicas": on}
        shared["balance"] = BALANCES[num_stages]
        pipe = build(rule, optimizer_fn=make, scheduler_fn=warm_up, recompute=recompute, **shared)
        losses = [float(result.loss) for result in pipe.run(data)]
        assert len(losses) == len(data)
        shared |= {"rule": rule, "make_scheduler": warm_up}
        plain = partial(plainly, data, make, **shared)
        yield Trained(f"{rule}, replicas {on}", pipe.state_dict(), losses, plain)
        pipe.close()


def loop(stream: StepResults, ending: str) -> list[StepResult]:
    results = []
    with suppress(OSError, KeyError):
        for result in stream:
            results.append(result)
            if len(results) == 2 and ending == "break":
                break
            if len(results) == 2 and ending == "body raises":
                raise KeyError
            if len(results) == 2 and ending == "close":
                stream.close()
    stream.close()
    return results


def ended_streams(num_ranks: int) -> Iterator[Trained]:
    """What went in is trained, and the pipeline goes on: a second stream, an evaluation."""
    data = batches(*[2 * num_ranks] * 8)
    shared: dict[str, Any] = {"num_microbatches": num_ranks, "balance": BALANCES[num_ranks]}
    rules = ("pipedream", "pipedream_2bw", "vertical_sync", "pipedream")
    for rule, ending in zip(rules, ("loader breaks", "break", "body raises", "close"), strict=True):
        fed: list[Batch] = []

        def loader(ending: str = ending, fed: list[Batch] = fed) -> Iterator[Batch]:
            for batch in data[:5] if ending == "loader breaks" else data:
                fed.append(batch)
                yield batch
            raise OSError("the disk is full")

        pipe = build(rule, optimizer_fn=momentum, **shared)
        results = loop(pipe.run(loader()), ending)
        assert len(results) == (5 if ending == "loader breaks" else 2), ending
        assert len(fed) == (5 if ending == "loader breaks" else 2 + pipe.ahead), ending
        tensors = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
        plain = partial(plainly, fed, momentum, rule=rule, **shared)
        losses = [float(result.loss) for result in results]
        yield Trained(f"{rule}, {ending}", tensors, losses, plain)
        assert len(list(pipe.run(data[:2]))) == 2, ending
        assert pipe.eval()(data[0][0]).shape == (2 * num_ranks, 5, 3), ending
        pipe.close()


def stream_with_an_infinite_loss(num_ranks: int) -> Trained:
    data = batches(*[2 * num_ranks] * 6)
    data[2] = data[2][0], torch.full_like(data[2][1], torch.inf)
    shared: dict[str, Any] = {"num_microbatches": num_ranks, "balance": BALANCES[num_ranks]}
    pipe = build("pipedream", optimizer_fn=momentum, **shared)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        results = list(pipe.run(data))
    everyone = tuple(range(num_ranks))
    assert [result.skipped for result in results] == [(), (), everyone, (), (), ()]
    assert len(told) == 1, [str(each.message) for each in told]
    assert str(told[0].message).startswith("step 2: gradients are not finite on stages 0, 1")
    plain = partial(plainly, data, careful, rule="pipedream", **shared)
    tensors = pipe.state_dict()
    pipe.close()
    return Trained("an infinite loss", tensors, [], plain)


class Failing(nn.Module):
    """In its tenth forward: of micro-batch 1 of mini-batch 4."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 10:
            raise ValueError("of the user's own")
        return x


def fail_in_a_layer(num_ranks: int) -> None:
    """Every rank is told of it by its own stream."""
    layers = [nn.Linear(6, 3), *(nn.Linear(3, 3) for _ in range(num_ranks - 2))]
    pipe = sl.Pipeline(
        LayerSequence.of([*layers, Failing()]),
        mse_loss,
        num_ranks=num_ranks,
        num_microbatches=2,
        schedule="pipedream",
        optimizer_fn=momentum,
        balance=[1] * num_ranks,
        options=sl.Options(timeout=20.0),
    )
    last = num_ranks - 1
    told = (
        rf"rank {last} failed in layer '{last}' at {last}F1 \(forward, micro-batch 1 of mini-batch "
        r"4\)\n  ValueError: of the user's own"
    )
    found = ""
    try:
        for _ in pipe.run(batches(*[4] * 12)):
            pass
    except sl.StageError as error:
        found = str(error)
    assert re.match(told, found), found


def clipped(make: Callable[[Weights], Optimizer], schedule: str, max_norm: float) -> list[bool]:
    """As with a barrier in one process; by step, whether it was made again.

    The stage in the middle has no weights, and so no optimizer that could tell how to clip.
    """
    data = batches(*[6] * 8)
    models = []
    for _ in range(2):
        torch.manual_seed(3)
        models.append(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
    sizes: dict[str, Any] = {"num_ranks": 3, "num_microbatches": 3, "balance": [1, 1, 1]}
    pipe = sl.Pipeline(
        models[0],
        mse_loss,
        schedule=schedule,
        optimizer_fn=make,
        options=sl.Options(max_norm=max_norm),
        **grouped(sizes),
    )
    redone = [bool(result.redone) for result in pipe.run(data)]
    pipe.close()
    plain = sl.Pipeline(models[1], mse_loss, backend="serial", **grouped(sizes))
    optimizer = make(list(models[1].parameters()))
    for inputs, target in data:
        plain.step(inputs, target)
        plain.clip_grad_norm_(max_norm)
        optimizer.step()
        optimizer.zero_grad()
    wanted = models[1].state_dict()
    for name, weight in pipe.state_dict().items():
        if any(redone):
            torch.testing.assert_close(weight, wanted[name], rtol=0.0, atol=1e-6)
        else:
            assert torch.equal(weight, wanted[name]), name
    return redone


def clip_in_processes() -> None:
    assert not any(clipped(momentum, "zb_h1", 1e3))
    assert any(clipped(momentum, "zb_h1", 0.5))
    assert not any(clipped(lambda weights: RMSprop(weights, 0.01), "1f1b", 0.5))


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    num_ranks = dist.get_world_size()
    streams = [*whole_streams(num_ranks)]
    if num_ranks == 2:
        streams.extend(ended_streams(num_ranks))
    if num_ranks == 3:
        streams.append(stream_with_an_infinite_loss(num_ranks))
        clip_in_processes()
    check(streams)
    if num_ranks > 2:
        fail_in_a_layer(num_ranks)
    print(f"{len(streams)} streams equal")
    dist.destroy_process_group()


def left_open() -> Iterator[object]:
    pipe = sl.Pipeline(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
        mse_loss,
        num_ranks=2,
        num_microbatches=1,
        schedule="pipedream",
        optimizer_fn=momentum,
        backend="threads",
    )
    stream = pipe.run([(torch.ones(2, 4), torch.ones(2, 4))] * 9)
    next(stream)
    return stream


if __name__ == "__main__":
    main()
    stream = left_open()
    sys.exit("left open")
