"""Mixed precision on two processes: gradients of bf16 weights that are added in float32."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import SGD

import stageline as sl
from stageline.zoo.cases import grouped
from stageline.zoo.gpt import Head, loss

OPTIONS: dict[str, Any] = {"num_ranks": 2, "num_microbatches": 4, "accumulate": torch.float32}


def model() -> nn.Sequential:
    """A bf16 model whose first and last layer share a weight."""
    torch.manual_seed(0)
    embedding = nn.Embedding(11, 8)
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.LayerNorm(8)) for _ in range(4)]
    return nn.Sequential(embedding, *blocks, Head(embedding)).bfloat16()


def batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    x, y = torch.randint(0, 11, (2, 8, 5), generator=generator)
    return x, y


def trained(*, replans: bool = False, **options: Any) -> dict[str, Tensor]:
    """Train four steps; gradients of the third wait for the fourth."""
    pipe = sl.Pipeline(model(), loss, **grouped(OPTIONS | options))
    optimizer = SGD([{"params": list(pipe.parameters())}], 0.2, momentum=0.9)
    for number in range(4):
        pipe.step(*batch(number))
        if replans and number:
            slow = number % 2
            times = [10.0 if rank == slow else 1.0 for rank in pipe.schedule.placement]
            timeline = sl.simulate(pipe.schedule, sl.Costs(times, times, times))
            assert pipe.replan(optimizer, [timeline]).moves
        types = {p.grad.dtype for p in pipe.parameters() if p.grad is not None}
        assert types == {torch.float32}, types
        if number != 2:
            pipe.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
    state = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
    pipe.close()
    return state


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor], what: str) -> None:
    assert found
    for name, tensor in found.items():
        assert torch.equal(tensor, wanted[name]), f"{what}: {name}"


def stages_on_two_processes() -> None:
    for schedule in ("1f1b", "zb_h1", "zbv"):
        wanted = trained(schedule=schedule, backend="serial")
        assert_same(trained(schedule=schedule), wanted, schedule)
    wanted = trained(backend="serial")
    assert_same(trained(replans=True), wanted, "layers that move")


def replicas() -> None:
    """Each has half of the samples; the sum of both is one of float32."""
    x, y = batch(0)
    wanted = None
    for part in (slice(0, 4), slice(4, 8)):
        plain = model().eval()
        for weight in plain.parameters():
            weight.grad_dtype = torch.float32
        for a, b in zip(x[part].chunk(2), y[part].chunk(2), strict=True):
            value = loss(plain(a), b)
            value.backward(torch.full_like(value, 0.25))  # type: ignore[no-untyped-call]
        found = [p.grad for p in plain.parameters() if p.grad is not None]
        wanted = [a + b for a, b in zip(wanted, found, strict=True)] if wanted else found
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "pp"))
    own = slice(0, 4) if mesh.get_local_rank("dp") == 0 else slice(4, 8)
    for shared_memory in (True, False):
        options = OPTIONS | {"num_ranks": 1, "num_microbatches": 2, "mesh": mesh}
        whole = model().eval()
        pipe = sl.Pipeline(whole, loss, **grouped(options | {"shared_memory": shared_memory}))
        pipe.step(x[own], y[own])
        for weight, expected in zip(whole.parameters(), wanted or [], strict=True):
            assert weight.grad is not None
            assert weight.grad.dtype == torch.float32
            if weight is whole[0].weight:  # tied: the uses are added in another order
                torch.testing.assert_close(weight.grad, expected)
            else:
                assert torch.equal(weight.grad, expected)
        pipe.close()


class Cast(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)


def norms_of_weights_of_two_types() -> None:
    """The first rank has bf16 weights only, the second one float32; both clip by the same norm."""
    found = []
    for backend in ("serial", "processes"):
        torch.manual_seed(1)
        first = nn.Sequential(Cast(torch.bfloat16), nn.Linear(8, 8).bfloat16())
        second = nn.Sequential(Cast(torch.float32), nn.Linear(8, 8))
        pipe = sl.Pipeline(
            *(nn.Sequential(first, second), nn.functional.mse_loss),
            num_ranks=2,
            num_microbatches=2,
            balance=[2, 2],
            backend=backend,
        )
        pipe.step(torch.ones(4, 8), torch.zeros(4, 8))
        norm = pipe.clip_grad_norm_(0.1)
        found.append((norm, {name: weight.grad for name, weight in pipe.named_parameters()}))
        pipe.close()
    (wanted, whole), (norm, part) = found
    assert torch.equal(norm, wanted), (norm, wanted)
    assert part
    for name, gradient in part.items():
        assert torch.equal(gradient, whole[name]), name


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    stages_on_two_processes()
    replicas()
    norms_of_weights_of_two_types()
    print("equal")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
