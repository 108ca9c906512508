"""Models built on the meta device."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import stageline as sl
from stageline.errors import ModelError
from stageline.model.layers import Layer
from stageline.options import Options
from stageline.pipeline import Pipeline
from stageline.zoo.cases import grouped


class Head(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def on_meta() -> nn.Sequential:
    with torch.device("meta"):
        first = nn.Linear(4, 4)
        return nn.Sequential(first, nn.BatchNorm1d(4), nn.Linear(4, 4))


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_weights_are_the_same_however_the_model_is_cut(num_ranks: int) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, several = on_meta(), on_meta()
    Pipeline(one, mse_loss, num_ranks=1, num_microbatches=2, options=Options(seed=7)).close()
    pipe = Pipeline(
        several, mse_loss, num_ranks=num_ranks, num_microbatches=2, options=Options(seed=7)
    )
    assert torch.equal(torch.get_rng_state(), before)
    for a, b in zip(one.state_dict().values(), several.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    pipe.verify(torch.randn(4, 4), torch.randn(4, 4))
    pipe.close()


def test_a_function_of_the_user_s_own_fills_a_layer() -> None:
    def fill(layer: Layer) -> None:
        for tensor in layer.module.parameters():
            nn.init.constant_(tensor, float(layer.name) + 1)

    with torch.device("meta"):
        first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    Pipeline([first, second], mse_loss, num_ranks=2, num_microbatches=1, init_fn=fill).close()
    assert torch.equal(first.weight, torch.ones(2, 2))
    assert torch.equal(second.bias, torch.full((2,), 2.0))


def test_a_weight_that_layers_share_stays_one() -> None:
    with torch.device("meta"):
        linear = nn.Linear(4, 4, bias=False)
        head = Head(linear)
    pipe = Pipeline(
        [linear, nn.Tanh(), head],
        mse_loss,
        num_ranks=3,
        num_microbatches=1,
        init_fn=lambda layer: nn.init.eye_(next(layer.module.parameters())),
    )
    assert linear.weight is head.weight
    assert len(list(pipe.parameters())) == 1
    pipe.close()


def test_a_module_that_cannot_fill_itself_is_named() -> None:
    with torch.device("meta"):
        linear = nn.Linear(4, 4, bias=False)
        head = Head(linear)
    with pytest.raises(ModelError, match=r"^'1', a Head, is on the meta device and has no reset_p"):
        Pipeline([nn.Linear(4, 4), head], mse_loss, num_ranks=2, num_microbatches=1)


class Rotary(nn.Module):
    """Has a table that is in no checkpoint, and is not initialised with the parameters."""

    def __init__(self, *, fills: bool = False, is_persistent: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.fills = fills
        table = torch.cos(torch.arange(4.0))
        self.register_buffer("table", table, persistent=is_persistent)

    def reset_parameters(self) -> None:
        if self.fills:
            self.table.copy_(torch.cos(torch.arange(4.0)))  # type: ignore[operator]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x) * self.table
        return out


class Holding(nn.Module):
    """Has one more tensor, given by the test."""

    def __init__(self, **more: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        for name, make in more.items():
            setattr(self, name, make())

    def reset_parameters(self) -> None:
        """Fills nothing."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return out


def normal(layer: Layer) -> None:
    for parameter in layer.module.parameters():
        nn.init.normal_(parameter)


def buffer(tensor: Tensor) -> Any:
    return nn.Buffer(tensor)


@pytest.mark.parametrize("backend", ["serial", "threads"])
def test_a_buffer_that_nobody_fills_is_named_at_the_first_step(backend: str) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), Rotary())
    for init in (normal, None):
        again = copy.deepcopy(model)
        pipe = Pipeline(
            again, mse_loss, num_ranks=2, num_microbatches=2, init_fn=init, backend=backend
        )
        for _ in range(2):
            with pytest.raises(ModelError, match=r"'1.table' was on the meta device and is not"):
                pipe.step(torch.randn(4, 4), torch.randn(4, 4))
        with pytest.raises(ModelError, match=r"'1.table' was on the meta device and is not"):
            pipe(torch.randn(4, 4))
        with pytest.raises(ModelError, match=r"'1.table' was on the meta device and is not"):
            pipe.verify(torch.randn(4, 4), torch.randn(4, 4))
        again[1].table.copy_(torch.ones(4))  # type: ignore[operator]
        pipe.step(torch.randn(4, 4), torch.randn(4, 4))
        pipe.close()


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("integers", lambda: buffer(torch.zeros(3, dtype=torch.int64))),
        ("short", lambda: buffer(torch.zeros(3, dtype=torch.int16))),
        ("bytes", lambda: buffer(torch.zeros(3, dtype=torch.uint8))),
        ("one", lambda: buffer(torch.zeros((), dtype=torch.int8))),
        ("mask", lambda: buffer(torch.zeros(3, dtype=torch.bool))),
        ("complex", lambda: buffer(torch.zeros(3, dtype=torch.complex128))),
        ("sixteen", lambda: buffer(torch.zeros(3, 4, dtype=torch.bfloat16).t())),
        ("weight", lambda: nn.Parameter(torch.zeros(3, 3, dtype=torch.float64))),
        ("eight", lambda: buffer(torch.empty(3, dtype=torch.float8_e4m3fn))),
    ],
)
def test_tensors_of_every_type_are_missed_if_nobody_fills_them(name: str, make: Any) -> None:
    def fill_all(layer: Layer) -> None:
        fill_linear(layer)
        getattr(layer.module, name).data.copy_(torch.ones(()))

    def fill_linear(layer: Layer) -> None:
        layer.module.linear.reset_parameters()  # type: ignore[operator, union-attr]

    with torch.device("meta"):
        model = Holding(**{name: make})
    batch = torch.randn(2, 4), torch.randn(2, 4)
    options: Any = {"num_ranks": 1, "num_microbatches": 1, "backend": "serial"}
    full = Pipeline([copy.deepcopy(model)], mse_loss, init_fn=fill_all, **grouped(options))
    full.step(*batch)
    for init in (fill_linear, None):
        pipe = Pipeline([copy.deepcopy(model)], mse_loss, init_fn=init, **grouped(options))
        with pytest.raises(ModelError, match=rf"^'0.{name}' was on the meta device and is not"):
            pipe.step(*batch)


def test_a_tensor_that_is_filled_in_part_or_only_scaled_is_missed() -> None:
    def in_part(layer: Layer) -> None:
        next(layer.module.parameters()).data[:3].normal_()

    def scaled(layer: Layer) -> None:
        next(layer.module.parameters()).data.mul_(0.02).add_(1)

    for init in (in_part, scaled):
        with torch.device("meta"):
            linear = nn.Linear(4, 4, bias=False)
        pipe = Pipeline([linear], mse_loss, num_ranks=1, num_microbatches=1, init_fn=init)
        with pytest.raises(ModelError, match=r"'0.weight' was on the meta device"):
            pipe.step(torch.randn(2, 4), torch.randn(2, 4))
        pipe.close()


def test_a_module_may_fill_its_buffers_itself() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), Rotary(fills=True))
    pipe = Pipeline(model, mse_loss, num_ranks=2, num_microbatches=2, backend="serial")
    pipe.verify(torch.randn(4, 4), torch.randn(4, 4))


def test_a_checkpoint_may_fill_what_init_does_not(tmp_path: Path) -> None:
    def build(init: Any, *, is_persistent: bool) -> Pipeline:
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(4, 4), Rotary(is_persistent=is_persistent))
        return Pipeline(model, mse_loss, num_ranks=2, num_microbatches=2, init_fn=init)

    def fill(layer: Layer) -> None:
        normal(layer)
        for table in layer.module.buffers():
            table.fill_(2.0)

    batch = torch.randn(4, 4), torch.randn(4, 4)
    saved = build(fill, is_persistent=True)
    sl.save(tmp_path, saved, step=0)
    loaded = build(lambda _: None, is_persistent=True)
    sl.load(tmp_path, loaded)
    assert float(loaded.step(*batch).loss) == float(saved.step(*batch).loss)
    lost = build(lambda _: None, is_persistent=False)
    with pytest.raises(ModelError, match="have no buffers that are not persistent"):
        lost.step(*batch)
    for pipe in (saved, loaded, lost):
        pipe.close()


@pytest.mark.parametrize(
    "value",
    [
        lambda: torch.arange(4.0),
        lambda: [1, {"a": torch.ones(2)}],
        lambda: [nn.Parameter(torch.ones(2))],
    ],
)
def test_a_tensor_on_meta_that_is_no_buffer_is_named(value: Any) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Holding(tables=value)))
    pipe = Pipeline(model, mse_loss, num_ranks=2, num_microbatches=1, init_fn=normal)
    with pytest.raises(ModelError, match=r"'1.0.tables' is on the meta device and is neither a p"):
        pipe.step(torch.randn(4, 4), torch.randn(4, 4))
    pipe.close()
