"""Buffers that no checkpoint has, in models that were built on the meta device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import stageline as sl
from stageline.errors import ModelError

TABLE = torch.cos(torch.arange(4.0))


class Table(nn.Module):
    """Has a table that is not persistent, and a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))
        self.table: Tensor
        self.register_buffer("table", torch.empty(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight * self.table


class WithResetBuffers(Table):
    def reset_buffers(self) -> None:
        self.table.copy_(TABLE)


class WithNewBuffer(Table):
    def reset_buffers(self) -> None:
        self.table = TABLE.clone()


class WithResetParameters(Table):
    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        self.table.copy_(TABLE)


class Rotary(Table):
    """Behaves like a rotary embedding of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(size=4)
        for name in ("inv_freq", "original_inv_freq"):
            self.register_buffer(name, torch.empty(4), persistent=False)
        del self.table

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight * self.inv_freq + self.original_inv_freq  # type: ignore[operator]


class Rotary4(Rotary):
    def __init__(self) -> None:
        super().__init__()
        self.rope_init_fn = lambda config, device: (
            torch.cos(torch.arange(float(config.size), device=device)),
            1.0,
        )


class Rotary5(Rotary):
    rope_type = "default"

    @staticmethod
    def compute_default_rope_parameters(config: Any) -> tuple[Tensor, float]:
        return torch.cos(torch.arange(float(config.size))), 1.0


class Scaled(Rotary5):
    rope_type = "yarn"


class Partial(Table):
    def reset_buffers(self) -> None:
        self.table[:3] = TABLE[:3]


class Failing(Table):
    def reset_buffers(self) -> None:
        raise RuntimeError("not here")


class Model(nn.Sequential):
    """Initializes its modules itself, as models of transformers do."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__(*modules)
        self.initialized: list[str] = []

    def _init_weights(self, module: nn.Module) -> None:
        self.initialized.append(type(module).__name__)
        if isinstance(module, Table):
            module.weight.fill_(0.5)
            for buffer in module.buffers():
                buffer.copy_(TABLE)


class Unrelated(nn.Sequential):
    def _init_weights(self, std: float) -> None:
        raise AssertionError(std)


def pipeline(make: Any, init: Any = None) -> sl.Pipeline:
    with torch.device("meta"):
        model = make()
    return sl.Pipeline(
        model, mse_loss, num_ranks=2, num_microbatches=1, backend="serial", init_fn=init
    )


def ones(layer: sl.Layer) -> None:
    for parameter in layer.module.parameters():
        nn.init.ones_(parameter)


def batch() -> tuple[Tensor, Tensor]:
    return torch.ones(2, 4), torch.zeros(2, 4)


@pytest.mark.parametrize(
    "kind", [WithResetBuffers, WithNewBuffer, WithResetParameters, Rotary4, Rotary5]
)
def test_a_module_computes_its_buffers_again(kind: type[Table]) -> None:
    pipe = pipeline(lambda: nn.Sequential(nn.Linear(4, 4), kind()), ones)
    module = pipe.layers.modules[1]
    assert all(torch.equal(buffer, TABLE) for buffer in module.buffers())
    assert torch.equal(next(module.parameters()), torch.ones(4, 4))
    pipe.verify(*batch())


def test_weights_that_are_to_be_loaded_stay_uninitialized() -> None:
    pipe = pipeline(lambda: nn.Sequential(nn.Linear(4, 4), WithResetParameters()), lambda _: None)
    assert torch.equal(pipe.layers.modules[1].table, TABLE)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=r"'0.weight' was on the meta device and is not init"):
        pipe.step(*batch())
    pipe.load_state_dict({n: torch.ones_like(t) for n, t in pipe.state_dict().items()})
    pipe.step(*batch())


@pytest.mark.parametrize("kind", [Table, Scaled, Partial, Failing])
def test_what_cannot_be_computed_is_refused_at_the_first_step(kind: type[Table]) -> None:
    pipe = pipeline(lambda: nn.Sequential(nn.Linear(4, 4), kind()), ones)
    with pytest.raises(ModelError, match=r"'1.(table|inv_freq)' was on the meta device and is not"):
        pipe.step(*batch())
    for buffer in pipe.layers.modules[1].buffers():
        buffer.fill_(1.0)
    pipe.step(*batch())


def test_the_model_around_a_module_initializes_it() -> None:
    pipe = pipeline(lambda: Model(nn.Linear(4, 4), Scaled()))
    module = pipe.layers.modules[1]
    assert all(torch.equal(buffer, TABLE) for buffer in module.buffers())
    assert torch.equal(next(module.parameters()), torch.full((4, 4), 0.5))
    assert pipe.model.initialized == ["Linear", "Scaled"]
    pipe.verify(*batch())
    given = pipeline(lambda: Model(nn.Linear(4, 4), Scaled()), ones)
    assert all(torch.equal(buffer, TABLE) for buffer in given.layers.modules[1].buffers())
    assert torch.equal(next(given.layers.modules[1].parameters()), torch.ones(4, 4))


def test_a_function_of_other_arguments_is_not_called() -> None:
    pipe = pipeline(lambda: Unrelated(nn.Linear(4, 4), nn.Linear(4, 4)))
    pipe.verify(*batch())


def test_random_buffers_depend_on_the_seed_alone() -> None:
    class Random(Table):
        def reset_buffers(self) -> None:
            self.table.normal_()

    found = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        pipe = pipeline(lambda: nn.Sequential(nn.Linear(4, 4), Random()), ones)
        found.append(pipe.layers.modules[1].table)
        assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(*found)  # type: ignore[arg-type]
