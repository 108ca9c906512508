"""Trains a large embedding over processes, and compares it with a plain loop, bit for bit."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD

import stageline as sl
from stageline.runtime.stage import embedding_gradients
from stageline.zoo.plain import train_plainly

ROWS, WIDTH = 8200, 128  # just above 4 MiB


def model() -> nn.Sequential:
    torch.manual_seed(0)
    body = (nn.Flatten(), nn.Linear(6 * WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 5))
    return nn.Sequential(nn.Embedding(ROWS, WIDTH), *body)


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(1)
    data = [(torch.randint(0, ROWS, (8, 6)), torch.randint(0, 5, (8,))) for _ in range(3)]
    plain = sl.LayerSequence.of(model())
    train_plainly(
        plain, cross_entropy, SGD(plain.modules.parameters(), 0.5), data, num_microbatches=4
    )
    wanted = dict(zip(model().state_dict(), plain.modules.parameters(), strict=True))
    for schedule in ("1f1b", "zb_h1"):
        made = model()
        with sl.Pipeline(
            made, cross_entropy, num_ranks=2, num_microbatches=4, schedule=schedule
        ) as pipe:
            optimizer = SGD(pipe.parameters(), 0.5)
            for x, y in data:
                pipe.step(x, y)
                optimizer.step()
                optimizer.zero_grad()
            for name, weight in pipe.named_parameters():
                assert torch.equal(weight, wanted[name]), (schedule, name)
    dist.destroy_process_group()
    print(f"rows were added {len(additions)} times")


additions: list[int] = []
original = embedding_gradients._rows


def counted(gradient: Tensor, indices: Tensor, padding: int, shape: torch.Size) -> Tensor:
    additions.append(indices.numel())
    return original(gradient, indices, padding, shape)


if __name__ == "__main__":
    embedding_gradients._rows = counted
    main()
