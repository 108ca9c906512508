"""Mixed precision on two processes, held to one: gradients of bf16 weights that are added in
float32, and float16 with scaled losses.
"""

from __future__ import annotations

from typing import Any

import pytest
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
        named = pipe.named_parameters()
        found.append((norm, {name: w.grad for name, w in named if w.grad is not None}))
        pipe.close()
    (wanted, whole), (norm, part) = found
    assert torch.equal(norm, wanted), (norm, wanted)
    assert part
    assert all(torch.equal(part[name], whole[name]) for name in part)


def overflow(weight: nn.Parameter, steps: set[int]) -> None:
    """Make the first gradient of a weight infinite in these steps, as a large scale would."""
    seen = [0]

    def hook(gradient: Tensor) -> Tensor:
        seen[0] += 1
        is_wrong = (seen[0] - 1) // OPTIONS["num_microbatches"] in steps
        return gradient * float("inf") if is_wrong else gradient

    weight.register_hook(hook)  # type: ignore[no-untyped-call]


def scaled(backend: str) -> tuple[dict[str, Tensor], list[float], list[float]]:
    """Train under float16; in steps 1 and 2 one gradient of one stage overflows.

    Return the weights, and after each step the scale and the norm of all gradients.
    """
    network = model().float()
    pipe = sl.Pipeline(network, loss, num_ranks=2, num_microbatches=4, backend=backend)
    overflow(network[1][0].weight, {1})  # type: ignore[index]
    overflow(network[4][0].weight, {2})  # type: ignore[index]
    optimizer = SGD(pipe.parameters(), 0.2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    scales, norms = [], []
    for number in range(5):
        with torch.autocast("cpu", torch.float16):
            result = pipe.step(*batch(number), scaler=scaler)
        assert 0.0 < float(result.loss) < 20.0
        pipe.unscale_(scaler, optimizer)
        norms.append(float(pipe.clip_grad_norm_(0.5)))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    state = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
    pipe.close()
    return state, scales, norms


def overflow_on_one_rank() -> None:
    wanted, scales, norms = scaled("serial")
    found, own_scales, own_norms = scaled("processes")
    assert scales == own_scales == [2.0**10, 2.0**9, 2.0**8, 2.0**8, 2.0**9], (scales, own_scales)
    assert str(norms) == str(own_norms), (norms, own_norms)
    assert_same(found, wanted, "float16")


def autocast_on_two_processes() -> None:
    """One of the layers leaves autocast for itself: its backward must not be in it either."""
    for schedule in ("1f1b", "zb_h1", "interleaved_1f1b"):
        found = []
        for backend in ("threads", "processes"):
            network = model().float()
            network[2] = Exact()
            pipe = sl.Pipeline(
                *(network, loss),
                num_ranks=2,
                num_microbatches=4,
                schedule=schedule,
                backend=backend,
                recompute="except_last",
            )
            with torch.autocast("cpu", torch.bfloat16):
                pipe.step(*batch(0))
            own, named = set(pipe.parameters()), network.named_parameters(remove_duplicate=False)
            found.append({n: w.grad for n, w in named if w in own and w.grad is not None})
            pipe.close()
        assert_same(found[1], found[0], f"autocast with {schedule}")


class Exact(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return torch.tanh(self.linear(x.float()))


def scaler_without_unscale() -> None:
    """Each process unscales its own gradients only: the next step warns of it."""
    pipe = sl.Pipeline(model().float(), loss, num_ranks=2, num_microbatches=4)
    optimizer, scaler = SGD(pipe.parameters(), 0.2), torch.amp.GradScaler("cpu")
    pipe.step(*batch(0), scaler=scaler)
    pipe.step(*batch(0), scaler=scaler)  # adds to the first
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    with pytest.warns(UserWarning, match="unscale_.* was not called"):
        pipe.step(*batch(0), scaler=scaler)
    pipe.close()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    stages_on_two_processes()
    replicas()
    norms_of_weights_of_two_types()
    overflow_on_one_rank()
    scaler_without_unscale()
    autocast_on_two_processes()
    print("equal")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
