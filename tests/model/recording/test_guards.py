"""Numbers that Python reads from tensors, or from shapes that follow from data."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.model.recording.parity import MODES, WIDTH, Mode, Model, assert_parity, batch
from torch import Tensor, nn

from stageline.model.recording.recorded_model import record_model


class Experts(nn.Module):
    """Some experts see no token."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        scores, chosen = self.gate(tokens).softmax(-1).max(-1)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == number)
            if rows.numel():
                out.index_add_(0, rows, expert(tokens[rows]) * scores[rows, None])
        return x + out.view_as(x)


class MixtureOfExperts(Model):
    def block(self) -> nn.Module:
        return Experts()


class SelectsInputs(Model):
    """The number of positions is in a shape, and goes into what is computed."""

    def forward(self, x: Tensor) -> Any:
        keep = x[..., 0] > 0
        chosen = x[keep]
        found = super().forward(chosen) * (chosen.shape[0] / 10)
        result = torch.zeros(*x.shape[:2], 3)
        result[keep] = found
        return result


class CountsInFunction(Model):
    """A function of torch reads the number, not Python."""

    def forward(self, x: Tensor) -> Any:
        positions = torch.arange((x[..., 0] > 0).sum())  # type: ignore[call-overload]
        return super().forward(x) * len(positions) + positions.sum()


class ReadsInputs(Model):
    def forward(self, x: Tensor) -> Any:
        scale = 1 + int(x.abs().max().item())
        lengths = (x[:, 0] > 0).sum(-1).tolist()
        found = super().forward(x if bool((x > 0).any()) else -x)
        return found / scale * max(lengths) * len(f"{x[0, 0].argmax()}")


class KeepsPositions(Model):
    """A table that the first call makes, and others for other lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None
        self.scale: Tensor | None = None
        self.tables: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Any:
        if self.table is None or self.table.shape[0] != x.shape[1]:
            self.table = torch.arange(x.shape[1] * 5).view(-1, 5) / 100
        if self.scale is None:
            with torch.no_grad():
                self.scale = self.embed(torch.ones(5)).mean()
        if x.shape[1] not in self.tables:
            self.tables[x.shape[1]] = torch.ones(x.shape[1], 1)
        return super().forward((x + self.table) * self.scale * self.tables[x.shape[1]])


class Temperature(Model):
    temperature = 1.0

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) / self.temperature


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.backend)
@pytest.mark.parametrize(
    "model",
    [MixtureOfExperts, SelectsInputs, CountsInFunction, ReadsInputs, KeepsPositions],
)
def test_each_batch_goes_its_own_way(model: type[Model], mode: Mode) -> None:
    batches = [batch(), batch(seed=1), batch(6, seed=2)]
    assert len(assert_parity(model, mode, batches)) == 5


def test_a_selection_of_which_nobody_asks_the_size_is_recorded_once() -> None:
    class Selects(Model):
        def forward(self, x: Tensor) -> Any:
            found = super().forward(x)
            return found[x[..., 0] > 0].mean()

    recorded = record_model(Selects(), batch()[0], {})
    for seed in range(4):
        recorded.prepare(batch(seed=seed)[0], {})
    assert len(recorded.tapes) == 1


def test_a_number_that_is_set_on_the_model_is_used_from_then_on() -> None:
    model = Temperature()
    recorded = record_model(model, batch()[0], {})
    model.seen = 3  # type: ignore[assignment]  # its code does not name it
    recorded.prepare(batch()[0], {})
    assert len(recorded.tapes) == 1
    model.temperature = 2.0
    recorded.prepare(batch()[0], {})
    assert len(recorded.tapes) == 2


def test_a_random_number_that_never_decides_is_allowed() -> None:
    def skip_none(_: Model, x: Tensor, block: Any) -> Any:
        return x if torch.rand([]) < 0.0 else block(x)

    assert_parity(type("LayerDrop", (Model,), {"apply_block": skip_none}))
