"""Dropouts in threads: the numbers of the layer's key, wherever the dropout comes from."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, mse_loss
from torch.utils.checkpoint import checkpoint

from stageline.model.layers import LayerSequence
from stageline.pipeline import Pipeline
from stageline.runtime.exactness.randomness.watched_draws import Drew, WatchedDraws

WIDTH = 6


class Block(nn.Module):
    """A linear layer and a dropout; `again` is called on the output, with the block."""

    def __init__(
        self, drop: nn.Module | None = None, again: Callable[[Block, Tensor], Tensor] | None = None
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.drop = drop or nn.Dropout(0.4)
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.drop(self.linear(x))
        return y if self.again is None else self.again(self, y)


class Doubled(nn.Dropout):
    """A dropout of the user's own."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def functional(block: Block, y: Tensor) -> Tensor:
    return dropout(y, 0.3, block.training)


def checkpointed(block: Block, y: Tensor) -> Tensor:
    found: Tensor = checkpoint(lambda x: block.drop(block.linear(x)).relu(), y, use_reentrant=False)
    return found


def twice(block: Block, y: Tensor) -> Tensor:
    return block.drop(y) + block.drop(y)  # type: ignore[no-any-return]  # a module returns Any


def shared_dropout() -> list[nn.Module]:
    drop = nn.Dropout(0.4)
    return [Block(drop) for _ in range(4)]


def shared_container() -> list[nn.Module]:
    drop = nn.Sequential(nn.ReLU(), nn.Dropout(0.4))
    return [Block(drop) for _ in range(4)]


def alternating(**options: bool) -> list[nn.Module]:
    return [Block(nn.Dropout(0.4, **options)) for _ in range(4)]


MODELS: dict[str, Callable[[], list[nn.Module]]] = {
    "modules": alternating,
    "in place": lambda: alternating(inplace=True),
    "several calls": lambda: [Block(again=twice) for _ in range(4)],
    "a function too": lambda: [Block(again=functional) for _ in range(4)],
    "in a checkpoint": lambda: [Block(again=checkpointed) for _ in range(4)],
    "one dropout in all layers": shared_dropout,
    "one container in all layers": shared_container,
    "lone dropouts": lambda: [nn.Linear(WIDTH, WIDTH), nn.Dropout(0.4), Block(), nn.Dropout(0.2)],
    "the user's own": lambda: [Block(Doubled(0.3)) for _ in range(4)],
    "all or nothing": lambda: [Block(nn.Dropout(p)) for p in (0.0, 1.0, 0.5, 0.0)],
}


@pytest.mark.parametrize("name", MODELS)
def test_threads_draw_what_one_rank_draws(name: str) -> None:
    found = []
    for backend, num_ranks in (("serial", 1), ("threads", 4)):
        torch.manual_seed(0)
        layers = LayerSequence.of(MODELS[name]())
        pipe = Pipeline(layers, mse_loss, num_ranks=num_ranks, num_microbatches=4, backend=backend)
        generator = torch.Generator().manual_seed(1)
        for step in range(5):  # observed twice, then not
            x = torch.randn(8, WIDTH, generator=generator)
            pipe.train(step != 3)
            pipe.step(x, x)
        found.append([p.grad for p in pipe.parameters()])
        pipe.close()
    for one, other in zip(*found, strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)


def test_modules_are_as_before_after_a_step_even_if_a_layer_raised() -> None:
    def fail(_: Block, y: Tensor) -> Tensor:
        if state["fails"]:
            raise ValueError("on purpose")
        return y

    state = {"fails": False}
    blocks = [Block(again=fail) for _ in range(2)]
    drops = [block.drop for block in blocks]
    pipe = Pipeline(blocks, mse_loss, num_ranks=2, num_microbatches=2, backend="threads")
    x = torch.randn(4, WIDTH)
    for _ in range(4):
        pipe.step(x, x)
    assert [block.drop for block in blocks] == drops
    state["fails"] = True
    with pytest.raises(Exception, match="on purpose"):
        pipe.step(x, x)
    assert [block.drop for block in blocks] == drops
    pipe.close()


@pytest.mark.parametrize("other", [nn.Dropout(0.7), nn.Identity(), Doubled(0.3)], ids=repr)
def test_a_dropout_that_the_user_exchanges_between_steps_is_used_from_then_on(
    other: nn.Module,
) -> None:
    found = []
    for backend, num_ranks in (("serial", 1), ("threads", 2)):
        torch.manual_seed(0)
        blocks = [Block() for _ in range(2)]
        pipe = Pipeline(blocks, mse_loss, num_ranks=num_ranks, num_microbatches=2, backend=backend)
        x = torch.ones(4, WIDTH)
        for step in range(6):
            if step == 3:
                blocks[1].drop = other
            pipe.step(x, x)
        assert blocks[1].drop is other
        found.append([p.grad for p in pipe.parameters()])
        pipe.close()
    for one, another in zip(*found, strict=True):
        assert one is not None
        assert another is not None
        assert torch.equal(one, another)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("modules", Drew.IN_DROPOUTS),
        ("several calls", Drew.IN_DROPOUTS),
        ("one dropout in all layers", Drew.IN_DROPOUTS),
        ("a function too", Drew.IN_FUNCTIONS),
        ("one container in all layers", Drew.IN_FUNCTIONS),
        ("the user's own", Drew.IN_FUNCTIONS),
    ],
)
def test_dropouts_are_replaced_where_no_other_rank_can_meet_them(name: str, expected: Drew) -> None:
    torch.manual_seed(0)
    layers = LayerSequence.of(MODELS[name]())
    pipe = Pipeline(layers, mse_loss, num_ranks=2, num_microbatches=4, backend="threads")
    x = torch.randn(8, WIDTH)
    for _ in range(3):
        pipe.step(x, x)
    draws = pipe._session.assembly.stages[0].draws
    assert isinstance(draws, WatchedDraws)
    first = layers.layers[0].module
    observed = {key: kind for key, kind in draws.observed.items() if isinstance(key, tuple)}
    drew = {kind for (module, _), kind in observed.items() if module is first}
    assert drew == {expected}
    pipe.close()
