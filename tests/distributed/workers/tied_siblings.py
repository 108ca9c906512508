"""Trains a stage with tied weights on two ranks, which have to keep the same weights."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD

import stageline as sl


class Head(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight.t())


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    first = nn.Linear(6, 6, bias=False)
    layers = [first, Head(first.weight), nn.Linear(6, 6)]
    data = [(torch.randn(8, 6), torch.randn(8, 6)) for _ in range(6)]
    sizes = {"num_ranks": 3, "num_microbatches": 4}
    pipe = sl.Pipeline(
        layers,
        mse_loss,
        num_ranks=3,
        num_microbatches=4,
        balance=[2, 1],
        schedule=sl.build_schedule("pipedream", **sizes, replicas=[2, 1]),  # type: ignore[arg-type]
        optimizer_fn=lambda params: SGD(params, 0.1),
    )
    before = first.weight.detach().clone()
    assert len(list(pipe.run(data))) == len(data)
    assert dist.get_rank() == 2 or not torch.equal(first.weight, before)
    weights: list[object] = [None] * 3
    dist.all_gather_object(weights, first.weight.tolist())
    pipe.close()
    dist.destroy_process_group()
    print("the same weights" if weights[0] == weights[1] else "weights differ")


if __name__ == "__main__":
    main()
