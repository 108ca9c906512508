"""Values of many sorts pass between two processes, and change from step to step."""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import stageline as sl


class Mode(Enum):
    UP = "up"
    DOWN = "down"


class Pair(NamedTuple):
    left: Tensor
    right: Tensor | None


@dataclass
class State:
    hidden: Tensor
    pair: Pair
    scale: float
    count: int
    mode: Mode
    dtype: torch.dtype
    rest: dict[Any, Any]


class Giving(nn.Module):
    """Counts its calls, which only the rank does that runs it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 4), 0

    def forward(self, x: Tensor) -> State:
        self.calls += 1
        mode = Mode.UP if self.calls % 2 else Mode.DOWN
        rest = {1: 2**80 + self.calls, (2, "b"): [complex(0, self.calls), b"bytes", None]}
        pair = Pair(self.linear(x).tanh(), None)
        return State(self.linear(x), pair, 0.5 / self.calls, self.calls, mode, torch.float64, rest)


class Taking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, state: State) -> Tensor:
        assert isinstance(state, State)
        assert state.rest[1] == 2**80 + state.count
        assert state.rest[2, "b"] == [complex(0, state.count), b"bytes", None]
        assert state.mode is (Mode.UP if state.count % 2 else Mode.DOWN)
        assert state.dtype is torch.float64
        assert state.pair.right is None
        found: Tensor = self.linear(state.hidden * state.scale + state.pair.left * state.count)
        return found


class Selecting(nn.Module):
    """How much it passes on depends on data."""

    def forward(self, x: Tensor) -> tuple[Tensor, Mode, int]:
        return x[x.sum(1) > 0], Mode.DOWN, len(x)


class Filling(nn.Module):
    def forward(self, given: tuple[Tensor, Mode, int]) -> Tensor:
        rows, mode, length = given
        assert mode is Mode.DOWN
        return rows.new_ones(length, 4) * rows.sum()


class Restless(nn.Module):
    """Another structure in its third call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 4), 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return Pair(self.linear(x), None if self.calls < 3 else x)


class Forgiving(nn.Module):
    def forward(self, pair: Pair) -> Tensor:
        return pair.left


def trained(layers: list[nn.Module], backend: str, steps: int = 4) -> sl.Pipeline:
    torch.manual_seed(0)
    layers = [*layers]
    for layer in layers:
        for parameter in layer.parameters():
            nn.init.normal_(parameter)
    pipe = sl.Pipeline(
        layers,
        nn.functional.mse_loss,
        num_ranks=2,
        num_microbatches=2,
        backend=backend,
        balance=[1, 1] if len(layers) == 2 else [2, 1],
        options=sl.Options(timeout=10.0, shared_memory=sys.argv[1:] != ["gloo"]),
    )
    for step in range(steps):
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(step))
        pipe.step(x, x)
    return pipe


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    models: list[list[nn.Module]] = [
        [Giving(), Taking()],
        [nn.Linear(4, 4), Selecting(), Filling()],
    ]
    for layers in models:
        pipes = [trained(copy.deepcopy(layers), name) for name in ("processes", "serial")]
        wanted = {name: p.grad for name, p in named(pipes[1])}
        for name, parameter in named(pipes[0]):
            expected = wanted[name]
            assert expected is not None
            if parameter.grad is not None:  # it is of this rank
                assert torch.equal(parameter.grad, expected), name
        pipes[0].close()
    with pytest.raises(sl.StageError, match="must return the same structure in every step"):
        trained([Restless(), Forgiving()], "processes")
    print("all equal")


def named(pipe: sl.Pipeline) -> list[tuple[str, nn.Parameter]]:
    return [*pipe.layers.modules.named_parameters()]


if __name__ == "__main__":
    main()
