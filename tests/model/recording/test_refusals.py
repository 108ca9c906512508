"""What a recording cannot hold is refused, with the reason, the line, and what to do instead."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stageline.errors import ModelError, StageError
from stageline.model.recording.recorded_model import RecordedModel, record_model
from stageline.pipeline import Pipeline

Glue = Callable[["Net", Tensor], Any]
HERE = re.escape(__file__)


class Net(nn.Module):
    """Two layers with something between them."""

    def __init__(self, glue: Glue) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.glue, self.count = glue, 0
        self.table = torch.zeros(4)

    def forward(self, x: Tensor) -> Any:
        return self.second(self.glue(self, self.first(x)))


def record(model: nn.Module) -> RecordedModel:
    return record_model(model, torch.ones(2, 4), {}, min_layers=2)


class Box:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def counted(net: Net, x: Tensor) -> Tensor:
    net.count += 1
    return x * net.count


def drawn(_: Net, x: Tensor) -> Tensor:
    return x * random.random()


def from_numpy(_: Net, x: Tensor) -> Tensor:
    return x + torch.from_numpy(x.detach().numpy())


def by_chance(_: Net, x: Tensor) -> Tensor:
    return x if torch.rand(()) < 0.5 else -x


def changed_constant(net: Net, x: Tensor) -> Tensor:
    net.table += 1
    return x + net.table


def changed_weight(net: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        net.second.weight.mul_(0.5)
    return x


def own_generator(_: Net, x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return x + torch.rand(4, generator=generator)


def own_backward(_: Net, x: Tensor) -> Tensor:
    x.sum().backward()  # type: ignore[no-untyped-call]
    return x.detach()


def made_parameter(net: Net, x: Tensor) -> Tensor:
    net.third = nn.Parameter(torch.empty(4))
    return x


def default_dtype(_: Net, x: Tensor) -> Tensor:
    torch.set_default_dtype(torch.float64)
    return x * torch.ones(4).float()


REFUSED: dict[str, tuple[Glue, str]] = {
    "numbers that change": (counted, r"the forward sets 'Net\.count' anew each time.*opaque="),
    "Python's generator": (drawn, "draws random numbers from Python or numpy.*use torch's"),
    "numpy": (from_numpy, f"{HERE}:[0-9]+: a tensor becomes an array of numpy.*use torch's"),
    "a branch by chance": (by_chance, f"{HERE}:[0-9]+: the model goes on by a random number"),
    "a constant": (changed_constant, f"{HERE}:[0-9]+: the forward changes a tensor.*register_buf"),
    "a weight": (changed_weight, f"{HERE}:[0-9]+: the forward changes a weight of shape"),
    "a generator": (own_generator, f"{HERE}:[0-9]+: .* a generator, but ranks draw in another"),
    "backward": (own_backward, rf"{HERE}:[0-9]+: the forward calls backward\(\) outside"),
    "a new weight": (made_parameter, "is a module or parameter that the forward has made"),
    "the default dtype": (default_dtype, f"{HERE}:[0-9]+: the forward sets the default dtype"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_recording_would_get_wrong_is_refused(name: str) -> None:
    glue, message = REFUSED[name]
    with pytest.raises(ModelError, match=message):
        record(Net(glue))
    assert torch.get_default_dtype() is torch.float32


def test_an_object_with_tensors_in_it_is_refused() -> None:
    class Unpack(nn.Module):
        def forward(self, box: Box) -> Tensor:
            return box.tensor

    class Boxes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.unpack, self.second = nn.Linear(4, 4), Unpack(), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            return self.second(self.unpack(Box(self.first(x))))

    with pytest.raises(ModelError, match=f"{HERE}:[0-9]+: unpack is called with a Box, in which t"):
        record_model(Boxes(), torch.randn(2, 4), {}, opaque=["unpack"])


def test_a_branch_on_what_layers_compute_is_refused_if_it_goes_another_way() -> None:
    def branch(_: Net, x: Tensor) -> Tensor:
        return x if float(x.detach().sum()) > 0 else -x

    torch.manual_seed(0)
    model = Net(branch)
    nn.init.ones_(model.first.weight)
    nn.init.zeros_(model.first.bias)
    options: dict[str, Any] = {"num_ranks": 2, "num_microbatches": 2}
    with Pipeline(
        model, nn.functional.mse_loss, example_inputs=torch.ones(4, 4), **options
    ) as pipe:
        pipe.verify(torch.ones(4, 4), torch.ones(4, 4))
        with pytest.raises(StageError, match="the model goes on by what its layers compute"):
            pipe.step(-torch.ones(4, 4), torch.ones(4, 4))


def test_such_a_branch_is_refused_on_meta() -> None:
    def branch(_: Net, x: Tensor) -> Tensor:
        return x if float(x.detach().sum()) > 0 else -x

    with torch.device("meta"):
        model = Net(branch)
    with pytest.raises(ModelError, match=r"but its weights are on the meta device: load them firs"):
        record(model)


def test_other_layers_for_another_batch_are_refused() -> None:
    class Depth(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks[: len(x) + 1]:
                x = block(x)
            return x

    recorded = record(Depth())
    with pytest.raises(ModelError, match=r"uses 'blocks\.3', but not for the one that was"):
        recorded.prepare(torch.ones(3, 4), {})


def test_scripted_and_lazy_modules_are_refused() -> None:
    lazy = Net(lambda _, x: x)
    lazy.first = nn.LazyLinear(4)
    with pytest.raises(ModelError, match="'first' is a LazyLinear, whose weights have no shape"):
        record(lazy)
    hooked = Net(lambda _, x: x)
    hooked.register_full_backward_hook(lambda *_: None)
    with pytest.raises(ModelError, match="has a backward hook, but its layers may be on several"):
        record(hooked)
