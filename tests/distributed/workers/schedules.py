"""Trains with every schedule in a group of processes, and beside it all ranks in this process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import stageline as sl
from stageline.zoo.cases import grouped
from stageline.zoo.gpt import Head, loss


class Embed(nn.Module):
    """Reads four things that the loader brings."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.embedding, self.kinds = embedding, nn.Embedding(2, 8)

    def forward(self, x: Tensor, pos: Tensor, mask: Tensor, kind: Tensor) -> Tensor:
        embedded: Tensor = (self.embedding(x) + self.kinds(kind)) * mask + pos
        return embedded


class Shift(nn.Module):
    def forward(self, x: Tensor, shift: Tensor, mask: Tensor) -> Tensor:
        return x + shift * mask


def model() -> list[sl.Layer]:
    """Named inputs on several ranks, tied weights on the first and the last, dropout, statistics.

    Hashes of the names differ from rank to rank; nothing may depend on them.
    """
    torch.manual_seed(0)
    embedding = nn.Embedding(11, 8)
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.LayerNorm(8)) for _ in range(3)]
    layers = [sl.Layer("embed", Embed(embedding), ("x", "pos", "mask", "kind"))]
    for number, part in enumerate(part for block in blocks for part in block):
        layers.append(sl.Layer(f"block.{number}", part))
    shift = sl.Layer("shift", Shift(), ("x", "shift", "mask"), ("x",))
    return [*layers, shift, sl.Layer("norm", nn.BatchNorm1d(5)), sl.Layer("head", Head(embedding))]


def batch(size: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    x, y = torch.randint(0, 11, (2, size, 5), generator=generator)
    pos, shift = torch.randn(2, size, 5, 8, generator=generator)
    mask = (torch.rand(size, 5, 1, generator=generator) > 0.2).float()
    kind = torch.randint(0, 2, (size, 5), generator=generator)
    return {"kind": kind, "pos": pos, "x": x, "shift": shift, "mask": mask}, y


def trained(options: dict[str, Any]) -> tuple[dict[str, Tensor], list[Tensor]]:
    """What this process holds after three steps, one of them short, and what it was told."""
    pipe = sl.Pipeline(model(), loss, **grouped(options))
    optimizer = torch.optim.AdamW(pipe.parameters(), 1e-2)
    generator = torch.Generator().manual_seed(3)
    told = []
    for size in (2 * options["num_ranks"] + 1, 2 * options["num_ranks"], 3):
        x, y = batch(size, generator)
        result = pipe.step(x, y)
        told.append(pipe.clip_grad_norm_(0.5))
        told.append(result.loss)
        optimizer.step()
        optimizer.zero_grad()
    pipe.eval()
    told.append(pipe(x))
    state = pipe.state_dict()
    pipe.close()
    return state, told


def cases(num_ranks: int, *, shared_memory: bool) -> Iterator[dict[str, Any]]:
    """Yield a pipeline's options for each schedule that there is for so many ranks."""
    for number, name in enumerate(sl.schedule_names(synchronous=True)):
        options: dict[str, Any] = {"num_ranks": num_ranks, "num_microbatches": 2 * num_ranks}
        with suppress(sl.ScheduleError):
            sl.build_schedule(name, **options)
            recompute = ("never", "always", "except_last")[number % 3]
            yield options | {
                "schedule": name,
                "recompute": recompute,
                "shared_memory": shared_memory,
            }


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    all_cases = [*cases(num_ranks, shared_memory=sys.argv[1:] != ["gloo"])]
    found = [trained(options) for options in all_cases]
    # each process runs some of them alone, for all processes
    own = [trained(options | {"backend": "serial"}) for options in all_cases[rank::num_ranks]]
    everywhere = [own] * num_ranks
    dist.all_gather_object(everywhere, own)
    for number, options in enumerate(all_cases):
        (state, heard), name = found[number], options["schedule"]
        wanted, expected = everywhere[number % num_ranks][number // num_ranks]
        assert state
        for key, tensor in state.items():
            assert torch.equal(tensor, wanted[key]), f"{name}: {key}"
        for a, b in zip(heard, expected, strict=True):
            assert torch.equal(a, b), f"{name}: {a} {b}"
    print(f"{len(found)} schedules equal")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
