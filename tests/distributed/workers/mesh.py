"""Trains with replicas, or with tensor parallelism, beside the pipeline; and in one process."""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import stageline as sl
from stageline.zoo.cases import grouped
from stageline.zoo.gpt import Head


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.dropout(self.down(torch.relu(self.up(x))))
        return x + added


def model(mesh: DeviceMesh | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    embedding, blocks = nn.Embedding(11, 8), [Mlp() for _ in range(4)]
    if mesh is not None:
        for block in blocks:
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return nn.Sequential(embedding, *blocks, Head(embedding))


def loss(output: Tensor, target: Tensor) -> Tensor:
    """A sum over what counts: a target of 0 does not."""
    each = nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="none")
    return (each * (target.flatten() > 0)).sum()


def count(target: Tensor) -> Tensor:
    return (target > 0).sum()


def whole(tensor: Tensor) -> Tensor:
    found: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found


def trained(part: slice, pipe: sl.Pipeline) -> tuple[dict[str, Tensor], list[float]]:
    """Each replica has its own part of every batch; the third step adds to the second."""
    optimizer = torch.optim.AdamW(pipe.parameters(), 1e-2)
    generator = torch.Generator().manual_seed(3)
    told = []
    for number in range(4):
        x, y = torch.randint(0, 11, (2, 16, 5), generator=generator)
        told.append(float(pipe.step(x[part], y[part]).loss))
        if number != 1:
            told.append(float(pipe.clip_grad_norm_(0.5)))
            optimizer.step()
            optimizer.zero_grad()
    state = {name: whole(tensor) for name, tensor in pipe.state_dict().items()}
    pipe.close()
    return state, told


def trained_by_one_process() -> tuple[dict[str, Tensor], list[float]]:
    """Train in the first process, for all of them."""
    found: list[Any] = [None]
    if dist.get_rank() == 0:
        options = sl.Options(count_fn=count)
        sizes: dict[str, Any] = {"num_ranks": 1, "num_microbatches": 8}
        alone = sl.Pipeline(model(), loss, backend="serial", options=options, **grouped(sizes))
        found = [trained(slice(None), alone)]
    dist.broadcast_object_list(found)
    return found[0]  # type: ignore[no-any-return]  # that of the first process


def main(names: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=tuple(names.split(",")))
    has_replicas = "dp" in names
    first = 8 * mesh.get_local_rank("dp") if has_replicas else 0
    part = slice(first, first + 8 if has_replicas else 16)
    options: dict[str, Any] = {"count_fn": count, "num_microbatches": 4 if has_replicas else 8}
    wanted, expected = trained_by_one_process()
    for name in ("1f1b", "interleaved_1f1b", "zbv"):
        made = model(None if has_replicas else mesh["tp"])
        before = copy.deepcopy(made)
        pipe = sl.Pipeline(made, loss, num_ranks=2, schedule=name, mesh=mesh, **grouped(options))
        if has_replicas:
            pipe.verify(*torch.randint(0, 11, (2, 16, 5))[:, part])
        found, heard = trained(part, pipe)
        if has_replicas:  # sums over gloo, as between machines: those of two have the same bits
            gloo = {**options, "shared_memory": False}
            pipe = sl.Pipeline(before, loss, num_ranks=2, schedule=name, mesh=mesh, **grouped(gloo))
            for key, tensor in trained(part, pipe)[0].items():
                assert torch.equal(tensor, found[key]), key
        for key, tensor in found.items():  # the order of the sums differs, so the last bits may
            torch.testing.assert_close(tensor, wanted[key], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(heard, expected, rtol=1e-5, atol=1e-6)
    print("equal but for rounding")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
