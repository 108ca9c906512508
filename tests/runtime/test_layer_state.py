"""State that a forward changes is changed once, whether or not the forward is recomputed."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm, mse_loss

from stageline.errors import StageError
from stageline.pipeline import Pipeline
from stageline.zoo.cases import grouped


class Ema(nn.Module):
    """Keeps a mean in a buffer and subtracts it."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return x - self.mean.clone()


class Replacing(nn.Module):
    """Keeps a mean in a plain attribute, as a new tensor each time."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(6)

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


class NormByHand(nn.Module):
    mean: Tensor
    variance: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("variance", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        scaled = x * self.variance.clone()
        return batch_norm(scaled, self.mean, self.variance, training=True)


class Counting(nn.Module):
    """Anneals by the number of calls, and keeps the last scales in a deque."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.scales = 0, deque([1.0], maxlen=3)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.scales.append(1 + 1 / self.calls)
        return x * sum(self.scales)


class Lazily(nn.Module):
    """Creates its state in the first forward, from the input."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "offset"):
            self.offset = x.detach()[0].clone()
        else:
            self.offset = self.offset * 0.5 + x.detach()[0]
        return x + self.offset


class Drawing(nn.Module):
    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return x * (0.5 + self.draw())


class OwnGenerator(nn.Module):
    def __init__(self, generator: Any, draw: Callable[[Any], float]) -> None:
        super().__init__()
        self.kept, self.draw = {"generators": [generator]}, draw

    def forward(self, x: Tensor) -> Tensor:
        return x * (0.5 + self.draw(self.kept["generators"][0]))


def of_torch(generator: torch.Generator) -> float:
    return float(torch.rand(1, generator=generator))


MAKERS: dict[str, Callable[[], nn.Module]] = {
    "EMA in a buffer": Ema,
    "EMA in an attribute": Replacing,
    "F.batch_norm by hand": NormByHand,
    "InstanceNorm": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten()
    ),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)),
    "spectral norm by hooks": lambda: nn.utils.spectral_norm(nn.Linear(6, 6)),
    "a counter": Counting,
    "made in the first forward": Lazily,
    "Python's random": lambda: Drawing(random.random),
    "numpy's random": lambda: Drawing(lambda: float(np.random.random())),
    "a generator of torch": lambda: OwnGenerator(torch.Generator().manual_seed(3), of_torch),
    "a generator of Python": lambda: OwnGenerator(random.Random(3), lambda g: g.random()),
    "a generator of numpy": lambda: OwnGenerator(
        np.random.default_rng(3), lambda g: float(g.random())
    ),
}


def trained(make: Callable[[], nn.Module], recompute: str, backend: str) -> dict[str, Any]:
    torch.manual_seed(1)
    random.seed(2)
    np.random.seed(2)
    model = nn.Sequential(nn.Linear(6, 6), nn.Sequential(make(), nn.Linear(6, 6)), nn.Linear(6, 3))
    pipe = Pipeline(
        model, mse_loss, num_ranks=3, num_microbatches=4, backend=backend, recompute=recompute
    )
    optimizer = torch.optim.SGD(pipe.parameters(), 0.1)
    for _ in range(3):
        pipe.step(torch.randn(8, 6), torch.randn(8, 3))
        optimizer.step()
        optimizer.zero_grad()
    pipe.close()
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


shares_generators = pytest.mark.filterwarnings("ignore:a layer drew from the generator")


@shares_generators
@pytest.mark.parametrize("backend", ["serial", "threads"])
@pytest.mark.parametrize("name", MAKERS)
def test_recomputation_neither_sees_nor_changes_later_state(name: str, backend: str) -> None:
    wanted = trained(MAKERS[name], "never", backend)
    found = trained(MAKERS[name], "always", backend)
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)


@shares_generators
@pytest.mark.parametrize("name", MAKERS)
def test_verify_accepts_state_that_is_changed_once_and_restores_it(name: str) -> None:
    torch.manual_seed(1)
    module = MAKERS[name]()
    model = nn.Sequential(nn.Linear(6, 6), module, nn.Linear(6, 3))
    x, y = torch.randn(8, 6), torch.randn(8, 3)
    options: dict[str, Any] = {"num_ranks": 3, "num_microbatches": 4, "backend": "serial"}
    pipe = Pipeline(model, mse_loss, recompute="always", **grouped(options))
    for _ in range(2):
        before = random.getstate(), {k: v.clone() for k, v in model.state_dict().items()}
        calls = getattr(module, "calls", 0)
        pipe.verify(x, y)
        assert random.getstate() == before[0]
        assert all(torch.equal(value, before[1][key]) for key, value in model.state_dict().items())
        assert getattr(module, "calls", 0) == calls
        pipe.step(x, y)


class Late(nn.Module):
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))
        self.is_on = False

    def forward(self, x: Tensor) -> Tensor:
        if self.is_on:
            self.count.add_(1)
        return x * 2


def test_a_buffer_that_starts_to_change_is_an_error_and_copied_afterwards() -> None:
    late = Late()
    model = nn.Sequential(nn.Linear(6, 6), late, nn.Linear(6, 3))
    pipe = Pipeline(model, mse_loss, num_ranks=1, num_microbatches=2, recompute="always")
    batch = torch.randn(4, 6), torch.randn(4, 3)
    pipe.step(*batch)
    late.is_on = True
    with pytest.raises(StageError, match="changed 'count' in place, but not when it first ran"):
        pipe.step(*batch)
    late.count.zero_()
    pipe.step(*batch)
    assert float(late.count) == 2


def test_a_layer_that_starts_to_use_global_generators_is_an_error_once() -> None:
    model = nn.Sequential(Drawing(random.random), nn.Linear(6, 6), Drawing(random.random))
    pipe = Pipeline(model, mse_loss, num_ranks=3, num_microbatches=2, backend="serial")
    batch = torch.randn(4, 6), torch.randn(4, 6)
    with pytest.warns(UserWarning, match="what they draw depends on the schedule"):
        pipe.step(*batch)
    pipe.step(*batch)
