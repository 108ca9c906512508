"""Steps in which nothing of a message, gradient or loss may pass through the host.

Its argument: over how many replicas the ranks are spread. Functions that copy to the host raise
inside of all steps but the first, which tells the forms of messages.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import mse_loss

import stageline as sl
from stageline.runtime.backends.processes.messages import encoding, gloo_messages, packing

TO_HOST: list[tuple[Any, str]] = [
    (packing, "memmove"),
    (packing.Packing, "pack"),
    (encoding, "encode"),
    (gloo_messages.Outgoing, "send_bytes"),
    (gloo_messages.Incoming, "receive_bytes"),
    *((Tensor, name) for name in ("cpu", "item", "tolist", "numpy", "__float__", "__bool__")),
]
# Functions that read what the host has made itself: sample counts, and which gradients there are.
OF_HOST = ("total", "_unflatten")


class Reader(nn.Module):
    """Reads a value of an earlier stage beside the last one's."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, early: Tensor) -> Tensor:
        read: Tensor = self.linear(x) + early
        return read


def model() -> list[sl.Layer]:
    torch.manual_seed(0)
    return [
        sl.Layer("first", nn.Linear(6, 6), writes=("early",)),
        sl.Layer("second", nn.Linear(6, 6), ("early",), ("x",)),
        sl.Layer("third", nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.1))),
        sl.Layer("fourth", Reader(), ("x", "early")),
    ]


@contextmanager
def nothing_on_the_host() -> Iterator[None]:
    with ExitStack() as stack:
        for owner, name in TO_HOST:
            refusing = refusal(name, getattr(owner, name))
            stack.enter_context(mock.patch.object(owner, name, refusing))
        yield


def refusal(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any, **options: Any) -> Any:
        caller = inspect.stack(0)[1].function
        assert caller in OF_HOST, f"{name} was called by {caller}"
        return function(*args, **options)

    return called


def trained(pipe: sl.Pipeline, part: slice, *, strict: bool) -> tuple[dict[str, Tensor], list[Any]]:
    optimizer = torch.optim.AdamW(pipe.parameters(), 1e-2)
    generator = torch.Generator().manual_seed(3)
    losses = []
    for number in range(4):
        x, y = torch.randn(2, 8, 6, generator=generator)
        if strict and number:
            with nothing_on_the_host():
                result = pipe.step(x[part], y[part])
        else:
            result = pipe.step(x[part], y[part])
        losses.append(result.loss)
        optimizer.step()
        optimizer.zero_grad()
    return pipe.state_dict(), losses


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    num_replicas = int(sys.argv[1])
    num_ranks = dist.get_world_size() // num_replicas
    mesh = init_device_mesh("cpu", (num_replicas, num_ranks), mesh_dim_names=("dp", "pp"))
    options: dict[str, Any] = {"num_ranks": num_ranks, "num_microbatches": 2, "schedule": "zb_h1"}
    pipe = sl.Pipeline(
        model(), mse_loss, mesh=mesh, options=sl.Options(check_streams=True), **options
    )
    half = 8 // num_replicas
    replica = mesh.get_local_rank("dp")
    state, losses = trained(pipe, slice(replica * half, (replica + 1) * half), strict=True)
    pipe.close()
    options["num_microbatches"] *= num_replicas
    plain = sl.Pipeline(model(), mse_loss, backend="serial", **options)
    wanted, expected = trained(plain, slice(0, 8), strict=False)
    assert state
    rtol, atol = (1e-5, 1e-6) if num_replicas > 1 else (0.0, 0.0)
    for name, tensor in state.items():
        torch.testing.assert_close(tensor, wanted[name], rtol=rtol, atol=atol)
    for one, other in zip(losses, expected, strict=True):
        torch.testing.assert_close(one, other)
    print("nothing on the host")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
