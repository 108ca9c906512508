"""Outputs in containers of all kinds, and their gradients, over processes and in one process."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import stageline as sl
from stageline.model.trees import tensors


@dataclass
class Output:
    logits: Any
    loss: Any = None


@dataclass
class Registered:
    logits: Any
    loss: Any = None


pytree.register_dataclass(Registered)


class Encoding(UserDict[str, Any]):
    pass


CONTAINERS: dict[str, Any] = {
    "dataclass": lambda x: Output(x, (x + 1, "text", None)),
    "registered": Registered,
    "ordered": lambda x: OrderedDict(z=x, a=[x.argmax(1), 3]),
    "user dict": lambda x: Encoding(logits=x),
    "complex": torch.fft.fft,
    "of data": lambda x: (x[x[:, 0] > 0], torch.arange(9)),
}


class Wrap(nn.Module):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor) -> Any:
        return self.make(x)


def first(tree: Any) -> Tensor:
    found = tensors(tree)[0]
    return found.abs() if found.is_complex() else found


def loss(output: Any, target: Tensor) -> Tensor:
    return (first(output).sum() - target.sum()).square()


def heard(make: Any, backend: str | None) -> list[Any]:
    """What this process is given: in evaluation, in training, and gradients."""
    torch.manual_seed(0)
    wrap, open_again = Wrap(make), Wrap(lambda tree: first(tree) * 2)
    layers = [nn.Linear(4, 3), wrap, open_again, nn.Linear(3, 3), wrap]
    pipe = sl.Pipeline(
        layers, loss, num_ranks=2, num_microbatches=3, balance=[2, 3], backend=backend
    )
    x = torch.randn(7, 4, requires_grad=True)
    output = pipe(x)
    found = [type(output).__name__, *tensors(output)]
    found += [[tensor.requires_grad for tensor in tensors(output)]]
    found += torch.autograd.grad(first(output).sum(), x)
    found += [[parameter.grad for parameter in pipe.parameters()]]
    first(pipe(x)).square().sum().backward()  # type: ignore[no-untyped-call]
    pipe.step(x.detach(), torch.ones(7))
    pipe.verify(x.detach(), torch.ones(7))
    found += [{name: p.grad for name, p in pipe.layers.modules.named_parameters()}]
    found += tensors(pipe.eval()(x.detach()))
    pipe.close()
    return found


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):  # gradients of the parameters that are here
        return all(tensor is None or torch.equal(tensor, b[name]) for name, tensor in a.items())
    if isinstance(a, list) and any(tensor is None for tensor in a):
        return all(tensor is None for tensor in (*a, *b))
    return torch.equal(a, b) if isinstance(a, Tensor) else a == b


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name, make in CONTAINERS.items():
        found, wanted = heard(make, None), heard(make, "serial")
        assert len(found) == len(wanted), name
        for number, (a, b) in enumerate(zip(found, wanted, strict=True)):
            assert same(a, b), f"{name} {number}: {a} {b}"
    print(f"{len(CONTAINERS)} containers equal")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
