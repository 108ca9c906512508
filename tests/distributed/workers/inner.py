"""Layers that differentiate, and hooks on tied weights: each rank has a plain loop's numbers."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  as everybody calls it

import stageline as sl
from stageline.zoo.cases import grouped


class Penalty(nn.Module):
    """Takes gradients, a transform, and a backward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        z = x.detach().requires_grad_()
        (found,) = torch.autograd.grad(torch.tanh(self.a(z)).sum(), z, create_graph=True)
        self.a(x.detach()).square().mean().backward()
        slope: Tensor = torch.func.grad(lambda y: self.a(y).sum())(x)
        mapped: Tensor = torch.vmap(self.a)(x)
        return found + mapped + slope


class Head(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def differentiating() -> tuple[nn.Sequential, Tensor, Tensor]:
    torch.manual_seed(1)
    layers = [layer for _ in range(2) for layer in (nn.Linear(6, 6), Penalty())]
    return nn.Sequential(*layers), torch.randn(8, 6), torch.randint(0, 6, (8,))


def tied() -> tuple[nn.Sequential, Tensor, Tensor]:
    torch.manual_seed(2)
    embedding = nn.Embedding(6, 6)
    blocks = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)]
    model = nn.Sequential(embedding, *blocks, Head(embedding.get_parameter("weight")))
    return model, torch.randint(0, 6, (8,)), torch.randint(0, 6, (8,))


def hook(weight: Tensor, seen: list[Tensor]) -> None:
    weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))  # type: ignore[no-untyped-call]
    note = lambda found: seen.append(found.grad.clone())  # noqa: E731
    weight.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]


def check(make: Callable[[], tuple[nn.Sequential, Tensor, Tensor]], **options: str) -> None:
    """Two steps without zero_grad between them."""
    plain, x, y = make()
    model, _, _ = make()
    wanted: list[Tensor] = []
    seen: list[Tensor] = []
    hook(plain[0].weight, wanted)  # type: ignore[arg-type]
    for _ in range(2):
        for inputs, target in zip(x.chunk(4), y.chunk(4), strict=True):
            loss = F.cross_entropy(plain(inputs), target)
            loss.backward(torch.full_like(loss, 0.25))  # type: ignore[no-untyped-call]
    pipe = sl.Pipeline(model, F.cross_entropy, num_ranks=2, num_microbatches=4, **grouped(options))
    hook(model[0].weight, seen)  # type: ignore[arg-type]
    for _ in range(2):
        pipe.step(x, y)
    here = {id(parameter) for parameter in pipe.parameters()}
    pairs = zip(plain.parameters(), model.parameters(), strict=True)
    for number, (parameter, found) in enumerate(pairs):
        if id(found) in here:
            assert parameter.grad is not None
            assert found.grad is not None
            assert torch.equal(parameter.grad, found.grad), (number, options)
    if id(model[0].weight) in here:
        assert len(seen) == len(wanted) == 8
        assert all(map(torch.equal, seen, wanted))
    pipe.verify(x, y)
    pipe.close()


def main(what: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if what == "disagree":
        model, x, y = tied()
        pipe = sl.Pipeline(
            model, F.cross_entropy, num_ranks=2, num_microbatches=4, options=sl.Options(timeout=8.0)
        )
        if dist.get_rank() == 0:
            hook(model[0].weight, [])  # type: ignore[arg-type]
        pipe.step(x, y)
        return
    for make in (differentiating, tied):
        for schedule, recompute in (("1f1b", "always"), ("zb_h1", "never"), ("zbv", "always")):
            if make is tied or schedule != "zbv":  # five layers, four of the other
                check(make, schedule=schedule, recompute=recompute)
    print("equal")


if __name__ == "__main__":
    main(sys.argv[1])
