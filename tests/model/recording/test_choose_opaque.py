"""The modules that are never cut are those that a person would name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stageline.errors import ModelError
from stageline.model.recording.choose_opaque import choose_opaque
from stageline.model.recording.recorded_model import record_model


class Parts(nn.Module):
    """A module whose parts are attributes."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.children():
            x = x + part(x)
        return x


def linear() -> nn.Module:
    return nn.Linear(8, 8)


def block() -> nn.Module:
    return Parts(a=linear(), b=linear())


def blocks(number: int) -> list[nn.Module]:
    return [block() for _ in range(number)]


def stage(width: int) -> nn.Module:
    return Parts(blocks=nn.ModuleList(nn.Linear(width, width) for _ in range(2)), down=linear())


def level() -> nn.Module:
    return nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8))


def expert_block() -> nn.Module:
    return Parts(attention=linear(), experts=nn.ModuleList(linear() for _ in range(4)))


CASES: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "a list of blocks": (
        lambda: Parts(embed=linear(), blocks=nn.ModuleList(blocks(3)), head=linear()),
        ["embed", "blocks.0", "blocks.1", "blocks.2", "head"],
    ),
    "below other modules": (
        lambda: Parts(model=Parts(layers=nn.ModuleList(blocks(2)), norm=nn.LayerNorm(8))),
        ["model.layers.0", "model.layers.1", "model.norm"],
    ),
    "lists in a list": (
        lambda: Parts(stages=nn.ModuleList(nn.ModuleList(blocks(2)) for _ in range(2))),
        ["stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1"],
    ),
    "sequences of blocks in a list": (
        lambda: Parts(stages=nn.ModuleList(nn.Sequential(*blocks(2)) for _ in range(2))),
        ["stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1"],
    ),
    "sequences as attributes": (
        lambda: Parts(one=nn.Sequential(*blocks(2)), two=nn.Sequential(*blocks(2))),
        ["one.0", "one.1", "two.0", "two.1"],
    ),
    "stages that grow, as in a Swin": (
        lambda: Parts(stages=nn.ModuleList([stage(8), stage(16)])),
        [f"stages.{i}.{name}" for i in range(2) for name in ("blocks.0", "blocks.1", "down")],
    ),
    "a dict of blocks": (
        lambda: Parts(branches=nn.ModuleDict({"a": block(), "b": block()})),
        ["branches.a", "branches.b"],
    ),
    "a dict of lists": (
        lambda: Parts(branches=nn.ModuleDict({n: nn.ModuleList(blocks(2)) for n in "ab"})),
        ["branches.a.0", "branches.a.1", "branches.b.0", "branches.b.1"],
    ),
    "layers and norms in two lists": (
        lambda: Parts(
            convs=nn.ModuleList(linear() for _ in range(2)),
            norms=nn.ModuleList(nn.LayerNorm(8) for _ in range(2)),
        ),
        ["convs.0", "convs.1", "norms.0", "norms.1"],
    ),
    "the levels of a U-Net": (
        lambda: Parts(**{name: level() for name in ("e1", "e2", "mid", "d2", "d1")}),
        ["e1", "e2", "mid", "d2", "d1"],
    ),
    "a VGG": (
        lambda: Parts(
            features=nn.Sequential(*(nn.Conv2d(3, 3, 3) for _ in range(5))),
            head=nn.Linear(2, 2),
        ),
        [*(f"features.{i}" for i in range(5)), "head"],
    ),
    "a head with a hidden layer": (
        lambda: Parts(
            blocks=nn.ModuleList(blocks(6)), head=nn.Sequential(linear(), nn.GELU(), linear())
        ),
        [*(f"blocks.{i}" for i in range(6)), "head"],
    ),
    "blocks with experts": (
        lambda: Parts(layers=nn.ModuleList(expert_block() for _ in range(2))),
        ["layers.0", "layers.1"],
    ),
    "attributes alone": (
        lambda: Parts(**{name: block() for name in "abcde"}),
        ["a", "b", "c", "d", "e"],
    ),
    "one large attribute": (
        lambda: Parts(net=Parts(**{name: block() for name in "abcde"}), head=linear()),
        ["net.a", "net.b", "net.c", "net.d", "net.e", "head"],
    ),
    "torch's transformer": (
        lambda: nn.Transformer(8, 2, 2, 2, 8, batch_first=True),
        [
            f"{part}.{name}"
            for part in ("encoder", "decoder")
            for name in ("layers.0", "layers.1", "norm")
        ],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_layers_of(name: str) -> None:
    make, expected = CASES[name]
    assert list(choose_opaque(make())) == expected


def test_a_module_is_kept_whole_if_the_user_says_so() -> None:
    model = Parts(stages=nn.ModuleList(nn.Sequential(*blocks(2)) for _ in range(2)))
    assert list(choose_opaque(model, ["stages.1"])) == ["stages.0.0", "stages.0.1", "stages.1"]
    with pytest.raises(ModelError, match=r"opaque has 'stages.2', but the model has no module"):
        choose_opaque(model, ["stages.2"])


class Encodes(nn.Module):
    """Its forward is not what the model calls."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = block(), block()

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def encode(self, x: Tensor) -> Any:
        return self.b(self.a(x))


def test_a_module_of_which_another_method_is_called_is_opened() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.large = Encodes(), nn.Linear(8, 400)

        def forward(self, x: Tensor) -> Any:
            return self.large(self.encoder.encode(x))

    recorded = record_model(Model(), torch.randn(2, 8), {})
    assert [layer.name for layer in recorded.layers] == ["encoder.a", "encoder.b", "large"]


def test_modules_are_opened_until_there_are_enough_layers() -> None:
    model = Parts(**{name: block() for name in "abcde"})
    recorded = record_model(model, torch.randn(2, 8), {}, min_layers=6)
    assert len(recorded.layers) == 6
    assert "a.a" in [layer.name for layer in recorded.layers]
