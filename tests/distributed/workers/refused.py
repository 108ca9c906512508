"""What cannot be done right is refused on all ranks at the first step, and the next one works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import stageline as sl
from stageline.zoo.cases import grouped


class Table(nn.Module):
    """Has a buffer that nobody fills if it was built on the meta device."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.table


class Average(nn.Module):
    """Has a state that its forward moves."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.detach().mean(0), 0.5)
        return x + self.mean


class Sometimes(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return x, x if x[0, 0] > 0 else None


def weights(layer: sl.Layer) -> None:
    for parameter in layer.module.parameters():
        nn.init.ones_(parameter)


def pipeline(layers: list[nn.Module], **options: Any) -> sl.Pipeline:
    return sl.Pipeline(layers, mse_loss, num_ranks=2, num_microbatches=2, **grouped(options))


def told(act: Callable[[], Any]) -> None:
    try:
        act()
    except sl.StagelineError as error:
        print(error)
    else:
        raise AssertionError("nothing was refused")


def main() -> None:
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    with torch.device("meta"):
        layers = [nn.Linear(4, 4), Table()]
    pipe = pipeline(layers, init=weights)
    told(lambda: pipe.step(x, y))
    for table in pipe.layers.modules[1].buffers():
        table.fill_(1.0)  # where it is elsewhere, this does nothing
    pipe.step(x, y)
    pipe.close()
    shared = Average()
    pipe = pipeline([nn.Linear(4, 4), shared, shared], balance=[2, 1])
    told(lambda: pipe.step(x, y))
    pipe.close()
    pipe = pipeline([nn.Identity(), Sometimes()]).eval()
    some = torch.tensor([-1.0, -1.0, 1.0, 1.0])[:, None].expand(4, 4)
    told(lambda: pipe(some))
    pipe(some.abs())
    told(lambda: pipe({"x": x, "mask": y}))
    pipe.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
