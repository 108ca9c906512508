"""Layers in shards on two replicas of a pipeline of two ranks, held to a plain loop."""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

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


def schedules(mesh: DeviceMesh) -> None:
    wanted, expected = plainly(4)
    part = own_part(mesh)
    for schedule, recompute, reshards in (
        ("gpipe", "never", True),
        ("1f1b", "always", None),
        ("1f1b", "never", True),
        ("interleaved_1f1b", "except_last", True),
        ("zb_h1", "never", None),
        ("zbv", "always", True),
    ):
        options = {"num_microbatches": MICROBATCHES, "schedule": schedule, "recompute": recompute}
        made = model(mesh, reshard_after_forward=reshards)
        pipe = sl.Pipeline(made, loss_of, num_ranks=2, mesh=mesh, **grouped(options))
        found, told = trained(pipe, part, 4)
        what = f"{schedule} {recompute} {reshards}"
        assert_close(found, wanted, what)
        torch.testing.assert_close(told, expected, rtol=1e-5, atol=1e-6)
        pipe.close()
        print(what, "equal but for rounding")


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
            batches = [[tensor[part] for tensor in batch(number)] for number in range(3)]
            results = pipe.run(batches) if runs else (pipe.step(*each) for each in batches)
            assert not any(result.skipped for result in results)
            state = {name: whole(tensor) for name, tensor in pipe.state_dict().items()}
            found.append(state)
    assert_close(*found, "run and step")  # type: ignore[call-arg]  # two

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
    tasks[what](mesh)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
