"""Messages whose form changes between steps, and a batch that its owner overwrites after a step."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import stageline as sl
from stageline.pipeline import session_of
from stageline.runtime.backends.processes.channels.ordered_channel import OrderedChannel
from stageline.runtime.devices import watching_caller


class Either(nn.Module):
    """Gives its output in rows, and from the third call on in columns."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(6, 6), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        found: Tensor = self.linear(x)
        return found if self.calls < 3 else found.t().contiguous().t()


class Unchanged(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


def pipeline(layers: list[nn.Module], backend: str | None = None, **options: Any) -> sl.Pipeline:
    torch.manual_seed(0)
    for layer in layers:
        for parameter in layer.parameters():
            nn.init.normal_(parameter)
    if backend is None:
        options["check_streams"] = True
    return sl.Pipeline(
        layers,
        mse_loss,
        num_ranks=2,
        num_microbatches=1,
        backend=backend,
        options=sl.Options(timeout=10.0, **options),
    )


def gradients(pipe: sl.Pipeline, *, unfreezes: bool = False) -> list[Tensor | None]:
    """Return the gradients of this process after four steps; a frozen layer may thaw meanwhile."""
    layers = pipe.layers.layers
    if unfreezes:
        layers[0].module.requires_grad_(False)
    for step in range(4):
        if step == 2:
            layers[0].module.requires_grad_(True)
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        pipe.step(x, x)
    return [p.grad for p in layers[dist.get_rank()].module.parameters()]


def check_changes() -> None:
    told = "has another form than in the first step with a batch of this shape: tensor 0: its {}"
    for layer, what, unfreezes in ((Either, "stride was", False), (linear, "needs_gradient", True)):
        with pytest.raises(sl.StageError, match=told.format(what)):
            gradients(pipeline([layer(), linear()]), unfreezes=unfreezes)
        every = pipeline([layer(), linear()], fixed_message_forms=False)
        plain = pipeline([layer(), linear()], "serial")
        found, wanted = (gradients(pipe, unfreezes=unfreezes) for pipe in (every, plain))
        for one, other in zip(found, wanted, strict=True):
            assert one is not None
            assert other is not None
            assert torch.equal(one, other)
        every.close()


def linear() -> nn.Linear:
    return nn.Linear(6, 6)


def check_overwritten_batch() -> None:
    """The first stage passes on its input, whose message is still on its way after the step."""
    found = []
    for backend in (None, "serial"):
        pipe = pipeline([Unchanged(), linear()], backend)
        x, y = torch.empty(4, 6), torch.ones(4, 6)
        with watching_caller(session_of(pipe).assembly.layout.accelerators):
            for step in range(4):
                x.fill_(step)
                pipe.step(x, y)
            x.fill_(100.0)
        found.append([p.grad for p in pipe.layers.layers[1].module.parameters()])
        if backend is None:
            pipe.close()
    if dist.get_rank() == 1:
        for one, other in zip(*found, strict=True):
            assert one is not None
            assert other is not None
            assert torch.equal(one, other)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    check_changes()
    with mock.patch.object(OrderedChannel, "pause", side_effect=lambda _: time.sleep(0.05)):
        check_overwritten_batch()
    print("told")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
