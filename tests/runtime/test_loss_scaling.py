"""A GradScaler of torch around a pipeline: bits, scales and skipped steps are a plain loop's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.functional import mse_loss
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD

import stageline as sl
from stageline.zoo.cases import grouped

STEPS = 6
MICROBATCHES = 4
WEIGHT = 1 / MICROBATCHES


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 3)
    )


def batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(8, 6, generator=generator), torch.randn(8, 3, generator=generator)


def scaler_of() -> GradScaler:
    """Too large at first, so that float16 overflows; it doubles again after two good steps."""
    return GradScaler("cpu", init_scale=2.0**19, growth_interval=2)


class Trained:
    """Weights after training, and what each step was like."""

    def __init__(self, network: nn.Module) -> None:
        self.network = network
        self.scaler = scaler_of()
        self.optimizer = SGD(network.parameters(), 0.1, momentum=0.9)
        self.scales: list[float] = []
        self.norms: list[float] = []
        self.losses: list[float] = []

    def update(self, norm: Tensor) -> None:
        self.norms.append(float(norm))
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.scales.append(self.scaler.get_scale())


def autocast() -> torch.autocast:
    return torch.autocast("cpu", torch.float16, cache_enabled=False)


def plainly(network: nn.Module) -> Trained:
    """Train as torch's documentation does, one micro-batch after another."""
    found = Trained(network)
    for number in range(STEPS):
        x, y = batch(number)
        total = 0.0
        for a, b in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
            with autocast():
                loss = mse_loss(network(a), b.to(a.dtype))
            scaled = found.scaler.scale(loss)
            scaled.backward(torch.full_like(scaled, WEIGHT))  # type: ignore[no-untyped-call]
            total += float(loss.detach()) * WEIGHT
        found.losses.append(total)
        found.scaler.unscale_(found.optimizer)
        found.update(clip_grad_norm_(network.parameters(), 0.5))
    return found


def pipelined(network: nn.Module, **options: Any) -> Trained:
    found = Trained(network)
    defaults: dict[str, Any] = {"num_ranks": 2, "num_microbatches": MICROBATCHES}
    with sl.Pipeline(network, mse_loss, **grouped(defaults | options)) as pipe:
        for number in range(STEPS):
            with autocast():
                result = pipe.step(*batch(number), scaler=found.scaler)
            pipe.unscale_(found.scaler, found.optimizer)
            found.losses.append(float(result.loss))
            found.update(pipe.clip_grad_norm_(0.5))
    return found


def assert_same(found: Trained, wanted: Trained) -> None:
    pairs = zip(found.network.parameters(), wanted.network.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert found.scales == wanted.scales
    assert str(found.norms) == str(wanted.norms)  # some are not finite
    assert found.losses == pytest.approx(wanted.losses, rel=1e-5)


@pytest.mark.parametrize("backend", ["threads", "serial"])
@pytest.mark.parametrize(
    ("schedule", "recompute"), [("1f1b", "never"), ("zb_h1", "always"), ("gpipe", "except_last")]
)
def test_float16_with_a_scaler_has_the_bits_of_a_plain_loop(
    schedule: str, recompute: str, backend: str
) -> None:
    wanted = plainly(model())
    found = pipelined(model(), schedule=schedule, recompute=recompute, backend=backend)
    assert_same(found, wanted)
    assert wanted.scales[0] < scaler_of().get_scale()  # the first step overflowed
    assert max(wanted.scales) > min(wanted.scales)  # and later the scale has grown


def test_losses_that_are_float16_are_scaled_as_autograd_does() -> None:
    def half_loss(output: Tensor, target: Tensor) -> Tensor:
        return (output - target.half()).square().mean().half()

    gradients = []
    for is_plain in (True, False):
        network, scaler = model(), GradScaler("cpu", init_scale=2.0**8)
        x, y = batch(0)
        if is_plain:
            for a, b in zip(x.chunk(4), y.chunk(4), strict=True):
                with autocast():
                    scaled = scaler.scale(half_loss(network(a), b))
                scaled.backward(torch.full_like(scaled, WEIGHT))  # type: ignore[no-untyped-call]
        else:
            with (
                sl.Pipeline(network, half_loss, num_ranks=2, num_microbatches=4) as pipe,
                autocast(),
            ):
                assert pipe.step(x, y, scaler=scaler).losses[0].loss.dtype == torch.float16
        gradients.append([weight.grad for weight in network.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_float16_weights_can_be_unscaled_if_their_gradients_are_added_in_float32() -> None:
    network, scaler = model().half(), GradScaler("cpu", init_scale=2.0**8)
    optimizer = SGD(network.parameters(), 0.1)
    x, y = batch(0)
    options: dict[str, Any] = {"num_ranks": 2, "num_microbatches": 4, "accumulate": torch.float32}
    with sl.Pipeline(network, mse_loss, **grouped(options)) as pipe:
        pipe.step(x.half(), y.half(), scaler=scaler)
        pipe.unscale_(scaler, optimizer)
        assert {weight.grad.dtype for weight in pipe.parameters() if weight.grad is not None} == {
            torch.float32
        }
        assert float(pipe.clip_grad_norm_(1.0)) < 100.0
        scaler.step(optimizer)


def test_several_steps_are_added_before_they_are_unscaled() -> None:
    found = []
    for with_scaler in (True, False):
        network, scaler = model(), GradScaler("cpu", enabled=with_scaler)
        optimizer = SGD(network.parameters(), 0.1)
        with sl.Pipeline(network, mse_loss, num_ranks=2, num_microbatches=4) as pipe:
            for number in range(2):
                pipe.step(*batch(number), scaler=scaler)
            pipe.unscale_(scaler, optimizer)
        found.append([weight.grad for weight in network.parameters()])
    for a, b in zip(*found, strict=True):  # in float32 a power of two changes no other bits
        assert torch.equal(a, b)


def test_a_loss_outside_of_the_pipeline_is_scaled_by_the_caller() -> None:
    network, scaler = model(), GradScaler("cpu", init_scale=2.0**8)
    optimizer = SGD(network.parameters(), 0.1)
    with sl.Pipeline(network, mse_loss, num_ranks=2, num_microbatches=4) as pipe:
        with autocast():
            loss = mse_loss(pipe(batch(0)[0]).float(), batch(0)[1])
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        pipe.unscale_(scaler, optimizer)
        assert float(pipe.clip_grad_norm_(1.0)) < 100.0


def test_what_cannot_be_scaled_is_refused() -> None:
    options: dict[str, Any] = {"num_ranks": 2, "num_microbatches": 2}
    with sl.Pipeline(model(), mse_loss, **options) as pipe:
        with pytest.raises(sl.ModelError, match=r"scaler is 2\.0, but has to be a GradScaler"):
            pipe.step(*batch(0), scaler=2.0)
        optimizer = SGD(pipe.parameters(), 0.1)
        with pytest.raises(sl.ModelError, match="has to be a GradScaler"):
            pipe.unscale_(optimizer, optimizer)  # type: ignore[arg-type]  # meant
    own: Any = lambda weights: SGD(weights, 0.1)  # noqa: E731
    with (
        sl.Pipeline(model(), mse_loss, optimizer_fn=own, **options) as pipe,
        pytest.raises(
            sl.ModelError, match=r"has an optimizer for each stage, .* omit optimizer_fn"
        ),
    ):
        pipe.step(*batch(0), scaler=scaler_of())
