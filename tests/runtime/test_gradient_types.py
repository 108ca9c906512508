"""Gradients of bf16 weights that are added in float32: the bits of a plain loop with that rule.

The rule is torch's own, `weight.grad_dtype`, which the plain loops of `stageline.zoo` set.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, AdamW, Optimizer

import stageline as sl
from stageline.model.layers import LayerSequence
from stageline.zoo.cases import grouped
from stageline.zoo.gpt import Head, gpt
from stageline.zoo.gpt import loss as token_loss
from stageline.zoo.plain import train_plainly
from stageline.zoo.plain_asynchronous import train_asynchronously

LENGTHS = (11, 5)  # samples of each step; with 5, some micro-batches are empty
NUM_MICROBATCHES = 8
RECOMPUTE = ("never", "always", "except_last")
Batch = tuple[Tensor, Tensor]


def language_model() -> LayerSequence:
    """A model of bf16 with tied weights, attention and dropout."""
    torch.manual_seed(1)
    layers = gpt(vocabulary=19, context=6, width=8, heads=2, blocks=2, dropout=0.1)
    layers.modules.to(torch.bfloat16)
    return layers


def token_batches() -> list[Batch]:
    torch.manual_seed(2)
    pairs = [torch.randint(0, 19, (2, n, 6)) for n in LENGTHS]
    return [(pair[0], pair[1]) for pair in pairs]


def optimizer_of(layers: LayerSequence) -> SGD:
    return SGD(layers.modules.parameters(), 0.2, momentum=0.9)


def add_in_float32(layers: LayerSequence) -> LayerSequence:
    for weight in layers.modules.parameters():
        weight.grad_dtype = torch.float32
    return layers


@cache
def wanted(*, in_float32: bool = True) -> dict[str, Tensor]:
    layers = language_model()
    if in_float32:
        add_in_float32(layers)
    options: dict[str, Any] = {"num_microbatches": NUM_MICROBATCHES, "seed": 3}
    train_plainly(layers, token_loss, optimizer_of(layers), token_batches(), **options)
    return layers.state_dict()


def trained(**options: Any) -> dict[str, Tensor]:
    layers = language_model()
    defaults = {"num_microbatches": NUM_MICROBATCHES, "seed": 3, "accumulate": torch.float32}
    optimizer = optimizer_of(layers)
    with sl.Pipeline(layers, token_loss, **grouped(defaults | options)) as pipe:
        for x, y in token_batches():
            pipe.step(x, y)
            optimizer.step()
            optimizer.zero_grad()
    return layers.state_dict()


def differences(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    return [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]


@pytest.mark.parametrize("number", range(len(sl.schedule_names(synchronous=True))))
def test_bf16_weights_with_float32_sums_have_the_bits_of_a_plain_loop(number: int) -> None:
    options = {
        "schedule": sl.schedule_names(synchronous=True)[number],
        "backend": ("threads", "serial")[number % 2],
        "num_ranks": (2, 3)[number % 2],
        "recompute": RECOMPUTE[number % 3],
    }
    assert differences(trained(**options), wanted()) == []


def test_the_sum_of_bf16_gradients_is_another_one_in_float32() -> None:
    assert differences(wanted(), wanted(in_float32=False))
    assert differences(trained(accumulate="exact", num_ranks=2), wanted(in_float32=False)) == []


def linear_model() -> nn.Sequential:
    torch.manual_seed(4)
    layers = [nn.Linear(6, 6, dtype=torch.bfloat16), nn.Tanh(), nn.Linear(6, 6)]
    return nn.Sequential(*layers[:2], Cast(), layers[2])


class Cast(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.float()


def numbers() -> tuple[Tensor, Tensor]:
    torch.manual_seed(5)
    return torch.randn(8, 6).bfloat16(), torch.randn(8, 6)


def pipeline(model: nn.Module, **options: Any) -> sl.Pipeline:
    defaults: dict[str, Any] = {"num_ranks": 2, "num_microbatches": 4, "accumulate": "float32"}
    return sl.Pipeline(model, mse_loss, **grouped(defaults | options))


def test_each_micro_batch_is_converted_and_added_in_float32() -> None:
    model, plain = linear_model(), linear_model()
    x, y = numbers()
    total = torch.zeros(6, 6)
    for a, b in zip(x.chunk(4), y.chunk(4), strict=True):
        (own,) = torch.autograd.grad(mse_loss(plain(a), b) * 0.25, plain.get_parameter("0.weight"))
        assert own.dtype == torch.bfloat16
        total += own
    for schedule in ("1f1b", "zb_h1"):
        model.zero_grad()
        with pipeline(model, schedule=schedule) as pipe:
            pipe.step(x, y)
            assert torch.equal(model.get_parameter("0.weight").grad, total)  # type: ignore[arg-type]  # it is there
            assert pipe.clip_grad_norm_(1e9).dtype == torch.float32
            pipe.zero_grad(set_to_none=False)
            pipe.verify(x, y)
            pipe.step(x, y)
            assert torch.equal(model.get_parameter("0.weight").grad, total)  # type: ignore[arg-type]  # as above


def test_weights_that_have_as_many_bits_are_left_as_they_are() -> None:
    model = linear_model()
    types = {name: weight.dtype for name, weight in model.named_parameters()}
    with pipeline(model):
        assert {name: weight.dtype for name, weight in model.named_parameters()} == types
        assert model.get_parameter("0.weight").grad_dtype == torch.float32
        assert model.get_parameter("3.weight").grad_dtype == torch.float32
    with pipeline(linear_model().double(), accumulate="float32") as pipe:
        assert {weight.grad_dtype for weight in pipe.parameters()} == {torch.float64}


def test_gradients_that_are_there_are_converted_and_added_to() -> None:
    model, whole = linear_model(), linear_model()
    x, y = numbers()
    with pipeline(whole) as pipe:
        pipe.step(x, y)
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    with pipeline(model) as pipe:
        pipe.step(x, y)
    for weight, other in zip(model.parameters(), whole.parameters(), strict=True):
        assert weight.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(weight.grad, other.grad + 1.0)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_a_type_that_the_caller_chose_for_a_weight_is_kept(schedule: str) -> None:
    model, plain = linear_model(), linear_model()
    x, y = numbers()
    for network in (model, plain):
        network.get_parameter("0.weight").grad_dtype = torch.float64
    for accumulate in ("exact", "fused"):
        model.zero_grad()
        with pipeline(model, accumulate=accumulate, schedule=schedule) as pipe:
            pipe.step(x, y)
        found = model.get_parameter("0.weight").grad
        assert found is not None
        assert found.dtype == torch.float64


def tied_model() -> nn.Sequential:
    torch.manual_seed(6)
    tokens = nn.Embedding(19, 8)
    return nn.Sequential(tokens, nn.Linear(8, 8), Head(tokens)).bfloat16()


def test_hooks_see_the_converted_gradient_of_each_micro_batch() -> None:
    model, plain = tied_model(), tied_model()
    x, y = torch.randint(0, 19, (2, 8, 6))
    seen: list[list[Tensor]] = [[], []]
    for network, heard in zip((model, plain), seen, strict=True):
        network[0].weight.register_hook(heard.append)  # type: ignore[operator]
    options: dict[str, Any] = {"num_ranks": 2, "num_microbatches": 4, "schedule": "zb_h1"}
    with sl.Pipeline(model, token_loss, **grouped(options | {"accumulate": "float32"})) as pipe:
        pipe.step(x, y)
    add_in_float32(LayerSequence.of(plain))
    for a, b in zip(x.chunk(4), y.chunk(4), strict=True):
        loss = token_loss(plain(a), b)
        loss.backward(torch.full_like(loss, 0.25))  # type: ignore[no-untyped-call]
    assert [gradient.dtype for gradient in seen[0]] == [torch.float32] * 4
    assert all(map(torch.equal, *seen))


def stream_layers() -> LayerSequence:
    torch.manual_seed(7)
    sizes = (nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 3))
    return LayerSequence.of(nn.Sequential(*sizes).bfloat16())


def stream_batches() -> list[Batch]:
    torch.manual_seed(8)
    return [(torch.randn(8, 6).bfloat16(), torch.randn(8, 3).bfloat16()) for _ in range(6)]


def momentum(weights: list[nn.Parameter]) -> Optimizer:
    return SGD(weights, 0.05, momentum=0.9)


@pytest.mark.parametrize("rule", ["pipedream", "pipedream_2bw"])
def test_asynchronous_schedules_add_in_float32_whatever_version_weights_have(rule: str) -> None:
    layers, plain = stream_layers(), add_in_float32(stream_layers())
    options: dict[str, Any] = {"num_ranks": 2, "num_microbatches": 2, "schedule": rule, "seed": 3}
    options |= {"accumulate": "float32", "balance": [2, 3]}
    with sl.Pipeline(layers, mse_loss, optimizer_fn=momentum, **grouped(options)) as pipe:
        for _ in pipe.run(stream_batches()):
            pass
    same: dict[str, Any] = {"num_microbatches": 2, "rule": rule, "seed": 3, "balance": [2, 3]}
    train_asynchronously(plain, mse_loss, momentum, stream_batches(), **same)
    assert differences(layers.state_dict(), plain.state_dict()) == []


def test_optimizers_of_stages_clip_and_step_with_float32_gradients() -> None:
    layers, plain = stream_layers(), stream_layers()
    options: dict[str, Any] = {"num_ranks": 2, "num_microbatches": 2, "accumulate": "float32"}
    with sl.Pipeline(
        layers, mse_loss, optimizer_fn=momentum, **grouped(options | {"max_norm": 0.05})
    ) as pipe:
        for x, y in stream_batches():
            pipe.step(x, y)
    optimizer = momentum([*plain.modules.parameters()])
    with sl.Pipeline(plain, mse_loss, **grouped(options)) as pipe:
        for x, y in stream_batches():
            pipe.step(x, y)
            pipe.clip_grad_norm_(0.05)
            optimizer.step()
            optimizer.zero_grad()
    assert differences(layers.state_dict(), plain.state_dict()) == []


def test_a_step_that_is_taken_back_was_made_with_float32_gradients() -> None:
    """No rank's own norm is above the limit, but that of both: so the first step is a guess."""
    options: dict[str, Any] = {"num_ranks": 2, "num_microbatches": 2, "accumulate": "float32"}
    data = stream_batches()[:2]
    with sl.Pipeline(stream_layers(), mse_loss, **grouped(options)) as pipe:
        pipe.step(*data[0])
        options["max_norm"] = 0.95 * float(pipe.clip_grad_norm_(1e9))
    late, early = stream_layers(), stream_layers()
    with sl.Pipeline(late, mse_loss, optimizer_fn=momentum, **grouped(options)) as pipe:
        redone = [result.redone for result in pipe.run(data)]
    assert redone[0]
    with sl.Pipeline(early, mse_loss, optimizer_fn=momentum, **grouped(options)) as pipe:
        for x, y in data:
            pipe.step(x, y)
    torch.testing.assert_close(late.state_dict(), early.state_dict(), rtol=2**-7, atol=2**-9)


def test_adam_is_refused_with_advice_before_it_has_stepped() -> None:
    layers = stream_layers()
    before = {name: tensor.clone() for name, tensor in layers.state_dict().items()}
    options: dict[str, Any] = {"num_ranks": 2, "num_microbatches": 2, "accumulate": "float32"}
    make: Callable[[list[nn.Parameter]], Optimizer] = lambda weights: AdamW(weights, 1e-2)  # noqa: E731
    with (
        sl.Pipeline(layers, mse_loss, optimizer_fn=make, **grouped(options)) as pipe,
        pytest.raises(sl.StageError, match=r"AdamW .* bfloat16 .* float32 .* torch.autocast"),
    ):
        pipe.step(*stream_batches()[0])
    assert differences(layers.state_dict(), before) == []


def test_training_goes_on_from_a_checkpoint_with_the_same_bits(tmp_path: Path) -> None:
    found = []
    for stops in (False, True):
        layers = language_model()
        optimizer = optimizer_of(layers)
        options = {"num_microbatches": 4, "accumulate": "float32", "num_ranks": 2}
        pipe = sl.Pipeline(layers, token_loss, **grouped(options))
        for x, y in token_batches():
            pipe.step(x, y)
            optimizer.step()
            optimizer.zero_grad()
            if stops:
                sl.save(tmp_path, pipe, optimizer, step=pipe.num_steps)
                pipe.close()
                layers = language_model()
                optimizer = optimizer_of(layers)
                pipe = sl.Pipeline(layers, token_loss, **grouped(options | {"num_ranks": 3}))
                sl.load(tmp_path, pipe, optimizer)
        pipe.close()
        found.append(layers.state_dict())
    assert differences(*found) == []


def test_other_values_are_refused_with_those_that_there_are() -> None:
    for wrong in ("int8", torch.int32, "float31", 32, None):
        with pytest.raises(sl.ModelError, match="'exact' or 'fused', or the floating"):
            pipeline(linear_model(), accumulate=wrong)
