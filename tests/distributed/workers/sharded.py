"""Layers in shards on two replicas of a pipeline of two ranks, held to a plain loop."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy
from torch.optim import AdamW

import stageline as sl
from stageline.zoo.cases import grouped

MICROBATCHES = 4


class Block(nn.Module):
    """Two sharded modules within a sharded one, with a width that two ranks do not share evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 13), nn.Linear(13, 8)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.down(torch.tanh(self.up(x)))
        return x + added


def model(mesh: DeviceMesh | None = None, **sharding: Any) -> nn.Sequential:
    """Some layers are not sharded: their gradients are summed by the pipeline."""
    torch.manual_seed(0)
    blocks = [Block() for _ in range(4)]
    made = nn.Sequential(nn.Embedding(11, 8), *blocks, nn.LayerNorm(8), nn.Linear(8, 11))
    if mesh is not None:
        for number, block in enumerate(blocks):
            if number == 1:
                fully_shard(block.up, mesh=mesh["dp"], **sharding)
            if number != 2:
                fully_shard(block, mesh=mesh["dp"], **sharding)
        fully_shard(made[0], mesh=mesh["dp"], **sharding)
    return made


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(output.flatten(0, 1), target.flatten())


def batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    x, y = torch.randint(0, 11, (2, 16, 5), generator=generator)
    return x, y


def plainly(steps: int) -> tuple[dict[str, Tensor], list[float]]:
    """Train on whole batches, in as many micro-batches as both replicas have together."""
    network = model()
    optimizer = AdamW(network.parameters(), 1e-2)
    told = []
    for number in range(steps):
        total = 0.0
        x, y = batch(number)
        for a, b in zip(x.chunk(2 * MICROBATCHES), y.chunk(2 * MICROBATCHES), strict=True):
            part = loss_of(network(a), b) / (2 * MICROBATCHES)
            part.backward()  # type: ignore[no-untyped-call]
            total += float(part.detach())
        told.append(total)
        if number != 1:  # the gradients of this step wait for the next
            told.append(float(nn.utils.clip_grad_norm_(network.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()
    return dict(network.state_dict()), told


def whole(tensor: Tensor) -> Tensor:
    found: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()
    return found


def own_part(mesh: DeviceMesh) -> slice:
    first = 8 * mesh.get_local_rank("dp")
    return slice(first, first + 8)


def trained(pipe: sl.Pipeline, part: slice, steps: int) -> tuple[dict[str, Tensor], list[float]]:
    optimizer = AdamW(pipe.parameters(), 1e-2)
    told = []
    for number in range(steps):
        x, y = batch(number)
        told.append(float(pipe.step(x[part], y[part]).loss))
        if number != 1:
            told.append(float(pipe.clip_grad_norm_(0.5)))
            optimizer.step()
            optimizer.zero_grad()
    state = {name: whole(tensor) for name, tensor in pipe.state_dict().items()}
    return state, told


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor], what: str) -> None:
    assert found
    for name, tensor in found.items():  # sums over replicas are rounded differently
        torch.testing.assert_close(
            tensor, wanted[name], rtol=1e-5, atol=1e-6, msg=f"{what}: {name}"
        )


SCHEDULES = (  # with what is recomputed, and whether weights are dropped after a forward
    ("1f1b", "always", None),
    ("interleaved_1f1b", "except_last", True),
    ("zb_h1", "never", True),
)
MORE_SCHEDULES = (
    ("gpipe", "never", True),
    ("1f1b", "never", True),
    ("zbv", "always", None),
    ("dualpipe_v", "never", True),
    ("hanayo", "except_last", None),
    ("looped_bfs", "always", True),
)


def schedules(mesh: DeviceMesh, cases: Iterable[tuple[str, str, bool | None]] = SCHEDULES) -> None:
    wanted, expected = plainly(4)
    part = own_part(mesh)
    for schedule, recompute, reshards in cases:
        options = {"num_microbatches": MICROBATCHES, "schedule": schedule, "recompute": recompute}
        made = model(mesh, reshard_after_forward=reshards)
        pipe = sl.Pipeline(made, loss_of, num_ranks=2, mesh=mesh, **grouped(options))
        found, told = trained(pipe, part, 4)
        assert_close(found, wanted, f"{schedule} {recompute} {reshards}")
        torch.testing.assert_close(told, expected, rtol=1e-5, atol=1e-6)
        in_shards: list[Any] = [p for p in pipe.parameters() if hasattr(p, "to_local")]
        assert in_shards
        assert all(weight.to_local().numel() < weight.numel() for weight in in_shards)
        pipe.close()
    print("all equal but for rounding")


def checkpoints(mesh: DeviceMesh) -> None:
    """From two shards to four stages without any, and back; the last step is compared."""
    part = own_part(mesh)
    found: list[Any] = [mkdtemp()]
    dist.broadcast_object_list(found)
    folder = Path(found[0])
    options: dict[str, Any] = {"num_microbatches": MICROBATCHES}

    def step(pipe: sl.Pipeline, optimizer: AdamW, number: int, own: slice) -> dict[str, Tensor]:
        x, y = batch(number)
        pipe.step(x[own], y[own])
        optimizer.step()
        optimizer.zero_grad()
        return {name: whole(tensor) for name, tensor in pipe.state_dict().items()}

    def sharded(schedule: str) -> tuple[sl.Pipeline, AdamW]:
        made = model(mesh)
        pipe = sl.Pipeline(made, loss_of, num_ranks=2, mesh=mesh, schedule=schedule, **options)
        return pipe, AdamW(pipe.parameters(), 1e-2)

    def plain() -> tuple[sl.Pipeline, AdamW]:
        pipe = sl.Pipeline(model(), loss_of, num_ranks=4, schedule="zb_h1", **options)
        return pipe, AdamW(pipe.parameters(), 1e-2)

    first = sharded("1f1b")
    step(*first, 0, part)
    sl.save(folder, *first, step=1)
    wanted = step(*first, 1, part)
    sl.export(folder / "whole.safetensors", first[0])
    first[0].close()

    second = plain()
    assert sl.load(folder, *second).step == 1
    assert_close(step(*second, 1, slice(None)), gathered(wanted), "without shards")
    sl.save(folder, *second, step=2)
    wanted = gathered(step(*second, 2, slice(None)))
    second[0].close()

    third = sharded("interleaved_1f1b")
    assert sl.load(folder, *third).step == 2
    assert_close(step(*third, 2, part), wanted, "in shards again")
    sl.load_pretrained(third[0], folder / "whole.safetensors")
    loaded = {name: whole(tensor) for name, tensor in third[0].state_dict().items()}
    third[0].load_state_dict(model().state_dict())
    initial = {name: whole(tensor) for name, tensor in third[0].state_dict().items()}
    third[0].close()
    exported = load_file(folder / "whole.safetensors")
    assert all(torch.equal(tensor, exported[name]) for name, tensor in loaded.items())
    assert all(torch.equal(initial[name], model().state_dict()[name]) for name in initial)
    print("checkpoints equal")


def other_ways(mesh: DeviceMesh) -> None:
    """Evaluate first, in inference mode; train by a loss outside; let the pipeline step; bf16."""
    part, x, y = own_part(mesh), *batch(0)
    options: dict[str, Any] = {"num_ranks": 2, "num_microbatches": MICROBATCHES, "mesh": mesh}

    plain = model()
    made = model(mesh)
    parameters = list(made.parameters())
    with sl.Pipeline(made, loss_of, **options) as pipe:
        pipe.eval()
        with torch.inference_mode():
            output = pipe(x[part])
        torch.testing.assert_close(output, plain(x[part]).detach())
        assert all(a is b for a, b in zip(parameters, made.parameters(), strict=True))
        pipe.train()
        (loss_of(pipe(x[part]), y[part]) / 2).backward()  # type: ignore[no-untyped-call]
        loss_of(plain(x), y).backward()  # type: ignore[no-untyped-call]
        assert_close(gradients(pipe), plain_gradients(plain), "a loss outside")
        pipe.step(x[part], y[part])
        loss_of(plain(x), y).backward()  # type: ignore[no-untyped-call]
        assert_close(gradients(pipe), plain_gradients(plain), "a step after it")

    found = []
    for runs in (False, True):
        make: Any = lambda weights: AdamW(weights, 1e-2)  # noqa: E731
        clipped = grouped(options | {"max_norm": 0.5})
        with sl.Pipeline(model(mesh), loss_of, optimizer_fn=make, **clipped) as pipe:
            pairs = [batch(number) for number in range(3)]
            batches = [(inputs[part], target[part]) for inputs, target in pairs]
            results = pipe.run(batches) if runs else (pipe.step(*each) for each in batches)
            assert not any(result.skipped for result in results)
            state = {name: whole(tensor) for name, tensor in pipe.state_dict().items()}
            found.append(state)
    assert_close(found[0], found[1], "run and step")

    types = (torch.bfloat16, torch.float32, torch.float32)  # of weights, their sums, and outputs
    policy = MixedPrecisionPolicy(*types)
    made, scaler = model(), torch.amp.GradScaler("cpu", init_scale=2.0**8)
    for layer in made:
        fully_shard(layer, mesh=mesh["dp"], mp_policy=policy)
    with sl.Pipeline(made, loss_of, **options) as pipe:
        optimizer = AdamW(pipe.parameters(), 1e-2)
        losses = []
        for _ in range(5):
            losses.append(float(pipe.step(x[part], y[part], scaler=scaler).loss))
            pipe.unscale_(scaler, optimizer)
            assert 0.0 < float(pipe.clip_grad_norm_(1.0)) < 100.0
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert losses[-1] < losses[0] - 0.1, losses
    print("other ways equal")


class Custom(nn.Module):
    """A model whose forward would be recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.second(torch.tanh(self.first(x)))
        return found


def refusals(mesh: DeviceMesh) -> None:
    part, x, y = own_part(mesh), *batch(0)
    options: dict[str, Any] = {"num_ranks": 2, "num_microbatches": MICROBATCHES, "mesh": mesh}

    def refused(made: Any, text: str, **others: Any) -> None:
        with pytest.raises(sl.ModelError, match=text):
            sl.Pipeline(made, loss_of, **grouped(options | others))

    over_all = init_device_mesh("cpu", (4,))
    made = model()
    fully_shard(made[1], mesh=over_all)
    ranks = r"ranks \[0, 1, 2, 3\], but the replicas of its stage are ranks"
    refused(made, f"'1.up.weight' is sharded over {ranks}")
    make: Any = lambda weights: AdamW(weights, 1e-2)  # noqa: E731
    refused(model(mesh), "older versions", schedule="pipedream", optimizer_fn=make)
    tied = model()
    tied[6].weight = tied[0].weight
    for layer in (tied[0], tied[6]):
        fully_shard(layer, mesh=mesh["dp"])
    refused(tied, "layers '0' and '6' share a weight")
    in_bf16 = model().bfloat16()
    fully_shard(in_bf16[1], mesh=mesh["dp"])
    refused(in_bf16, "reduce_dtype=torch.float32", accumulate="float32")
    custom = Custom()
    fully_shard(custom.first, mesh=mesh["dp"])
    refused(custom, "'first' is sharded .* an nn.Sequential", example_inputs=torch.ones(8, 8))
    around = fully_shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), mesh=mesh["dp"])
    refused(around, "'FSDPSequential' is sharded", example_inputs=torch.ones(8, 8))

    with sl.Pipeline(model(mesh), loss_of, **options) as pipe:
        with pytest.raises(sl.ModelError, match="verify needs the whole model"):
            pipe.verify(x[part], y[part])
        few = 2 if mesh.get_local_rank("dp") else 8
        with pytest.raises(sl.BatchError, match=r"batches of \[4, 2\] micro-batches"):
            pipe.step(x[:few], y[:few])
        scaler, optimizer = torch.amp.GradScaler("cpu"), AdamW(pipe.parameters(), 1e-2)
        pipe.step(x[part], y[part], scaler=scaler)
        if any(not hasattr(p, "to_local") for p in pipe.parameters()):
            with pytest.raises(sl.ModelError, match="make an optimizer for each sort"):
                pipe.unscale_(scaler, optimizer)
    deferred(mesh)
    print("refused, and the same weights")


def deferred(mesh: DeviceMesh) -> None:
    """Weights of a model on the meta device have the numbers that they have without shards."""
    options: dict[str, Any] = {"num_ranks": 2, "num_microbatches": MICROBATCHES, "mesh": mesh}
    with torch.device("meta"):
        whole_model = model()
        made = model(mesh)
    with sl.Pipeline(whole_model, loss_of, **options) as pipe:
        wanted = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
    with sl.Pipeline(made, loss_of, **options) as pipe:
        found = {name: whole(tensor) for name, tensor in pipe.state_dict().items()}
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in found.items())
        part, x, y = own_part(mesh), *batch(0)
        assert float(pipe.step(x[part], y[part]).loss) > 0
        assert all(p.grad is not None for p in pipe.parameters())


def gradients(pipe: sl.Pipeline) -> dict[str, Tensor]:
    return {n: whole(p.grad) for n, p in pipe.named_parameters() if p.grad is not None}


def plain_gradients(network: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad for n, p in network.named_parameters() if p.grad is not None}


def gathered(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return what all processes have."""
    found: list[dict[str, Tensor]] = [{}] * dist.get_world_size()
    dist.all_gather_object(found, state)
    return {name: tensor for each in found for name, tensor in each.items()}


def main(what: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    tasks = {"schedules": schedules, "checkpoints": checkpoints, "other": other_ways}
    tasks |= {"refusals": refusals, "more_schedules": partial(schedules, cases=MORE_SCHEDULES)}
    tasks[what](mesh)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
