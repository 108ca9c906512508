"""Layers see the caller's context variables, modes and hooks, in whichever thread they run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import mse_loss
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from stageline.errors import ModelError
from stageline.pipeline import Pipeline
from stageline.zoo.cases import grouped

SCALE: ContextVar[float] = ContextVar("SCALE", default=1.0)


class InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004  torch asks for it
        return x * SCALE.get()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: ARG004  as above
        return gradient * SCALE.get()


class Scaled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = InBackward.apply(x)  # type: ignore[no-untyped-call]
        return out


class Makes(nn.Module):
    """Creates a tensor on the default device."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.ones(4, dtype=x.dtype)


def layers(middle: Callable[[], nn.Module] = Scaled) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), middle(), nn.Linear(4, 4), middle())


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.fixture(params=["serial", "threads"])
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_layers_see_context_variables_of_the_caller(backend: str, recompute: str) -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return mse_loss(output * SCALE.get(), target)

    model, plain = layers(), layers()
    options: Any = {"num_ranks": 3, "num_microbatches": 2, "schedule": "zb_h1"}
    pipe = Pipeline(model, loss, backend=backend, recompute=recompute, **grouped(options))
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    for scale in (2.0, 0.25):  # threads stay, the caller's context changes
        token = SCALE.set(scale)
        pipe.step(x, y)
        for a, b in zip(x.chunk(2), y.chunk(2), strict=True):
            (loss(plain(a), b) * 0.5).backward()  # type: ignore[no-untyped-call]
        pipe.verify(x, y)
        SCALE.reset(token)
    assert SCALE.get() == 1.0
    pairs = zip(gradients(model), gradients(plain), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    pipe.close()


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_layers_see_saved_tensor_hooks_of_the_caller(backend: str, recompute: str) -> None:
    packed: list[Tensor] = []

    def lossy(saved: Tensor) -> Tensor:
        packed.append(saved)
        return saved.bfloat16() if saved.is_floating_point() else saved

    def back(kept: Tensor) -> Tensor:
        return kept.float() if kept.is_floating_point() else kept

    model, plain, exact = layers(nn.ReLU), layers(nn.ReLU), layers(nn.ReLU)
    options: Any = {"num_ranks": 2, "num_microbatches": 2}
    pipe = Pipeline(model, mse_loss, backend=backend, recompute=recompute, **grouped(options))
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    with saved_tensors_hooks(lossy, back):
        pipe.step(x, y)
        assert packed
        pipe.verify(x, y)
    for whole in (plain, exact):
        for a, b in zip(x.chunk(2), y.chunk(2), strict=True):
            with saved_tensors_hooks(*((lossy, back) if whole is plain else (back, back))):
                part = mse_loss(whole(a), b) * 0.5
            part.backward()  # type: ignore[no-untyped-call]
    pairs = list(zip(gradients(model), gradients(plain), strict=True))
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not all(map(torch.equal, gradients(model), gradients(exact)))
    pipe.close()


def test_a_recomputation_after_the_with_block_sees_its_saved_tensor_hooks(backend: str) -> None:
    def outputs_of(model: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
        with saved_tensors_hooks(lambda saved: saved.bfloat16(), lambda kept: kept.float()):
            output = run(x)
        output.sum().backward()  # type: ignore[no-untyped-call]
        return gradients(model)

    model, plain = layers(nn.Tanh), layers(nn.Tanh)
    options: Any = {"num_ranks": 2, "num_microbatches": 1, "recompute": "always"}
    pipe = Pipeline(model, mse_loss, backend=backend, **grouped(options))
    x = torch.randn(4, 4)
    found, wanted = outputs_of(model, pipe, x), outputs_of(plain, plain, x)
    assert all(map(torch.equal, found, wanted))
    pipe.close()


def test_layers_see_the_default_device_of_the_caller(backend: str) -> None:
    pipe = Pipeline(layers(Makes), mse_loss, num_ranks=3, num_microbatches=2, backend=backend)
    x = torch.randn(4, 4)
    pipe(x)
    with torch.device("meta"), pytest.raises(Exception, match="meta"):
        pipe(x)
    pipe.close()


class Counting(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = Counter[str]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[getattr(func, "__name__", "")] += 1
        return func(*args, **(kwargs or {}))


class CountingBelow(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("kind", "name"), [(Counting, "linear"), (CountingBelow, "tanh_backward")])
def test_modes_of_the_caller_see_what_layers_do(backend: str, kind: Any, name: str) -> None:
    model = layers(nn.ReLU)
    pipe = Pipeline(model, mse_loss, num_ranks=3, num_microbatches=2, backend=backend)
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    with kind() as plain:
        for a, b in zip(x.chunk(2), y.chunk(2), strict=True):
            mse_loss(model(a), b).backward()  # type: ignore[no-untyped-call]
    with kind() as seen:
        pipe.step(x, y)
    assert seen.calls[name] == plain.calls[name] > 0
    pipe.step(x, y)  # and they are gone after it
    assert seen.calls[name] == plain.calls[name]
    pipe.close()


class Looking(nn.Module):
    """Records whether it runs in inference mode."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.found.append(torch.is_inference_mode_enabled())
        return x.mul_(2)


def test_layers_see_inference_mode_and_a_step_in_it_is_refused(backend: str) -> None:
    model = layers(Looking)
    pipe = Pipeline(model, mse_loss, num_ranks=3, num_microbatches=2, backend=backend)
    with torch.inference_mode():
        x = torch.randn(4, 4)
        output = pipe(x)
        assert torch.allclose(output, model(x.clone()))
        with pytest.raises(ModelError, match=r"a step was asked for in torch.inference_mode\(\)"):
            pipe.step(x, x)
    assert output.is_inference()
    assert set(model[2].found) == {True}  # type: ignore[arg-type]
    pipe.close()


def test_layers_flush_denormals_as_the_caller_does(backend: str) -> None:
    class Tiny(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 1e-39

    pipe = Pipeline(
        [Tiny(), nn.Identity()], mse_loss, num_ranks=2, num_microbatches=1, backend=backend
    )
    pipe.eval()
    x = torch.ones(2, 4)
    assert bool((pipe(x) > 0).all())
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormal numbers")
    try:
        output = pipe(x)
    finally:
        torch.set_flush_denormal(False)
    assert bool((output == 0).all())  # looked at here, where small numbers are none
    assert bool((pipe(x) > 0).all())
    pipe.close()
