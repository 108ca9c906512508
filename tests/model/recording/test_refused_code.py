"""What a recording cannot repeat is refused: with the reason, the line, and what to do."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from tests.model.recording.parity import WIDTH, Block, Model, assert_parity, batch, opened
from torch import Tensor, nn

from stageline.errors import ModelError, StageError
from stageline.model.recording.recorded_model import record_model

LINE = r"test_refused_code\.py:\d+: "


def draws_from_python(_: Model, x: Tensor, block: Any) -> Any:
    return block(x) if random.random() < 2 else x


def own_generator(_: Model, x: Tensor, block: Any) -> Any:
    return block(x) + torch.rand(WIDTH, generator=torch.Generator())


def branches_on_chance(_: Model, x: Tensor, block: Any) -> Any:
    return x if torch.rand([]) < 0.5 else block(x)


def array_of_values(_: Model, x: Tensor, block: Any) -> Any:
    return block(x) * float(x.detach().numpy().mean())


def changed_array(_: Model, x: Tensor, block: Any) -> Any:
    table = torch.arange(WIDTH).tolist()
    shared = torch.as_tensor(__import__("numpy").array(table, "float32"))
    shared += 1.0
    return block(x) + shared


def changes_weight(model: Model, x: Tensor, block: Any) -> Any:
    with torch.no_grad():
        model.head.weight.clamp_(-0.1, 0.1)
    return block(x)


def sets_data(model: Model, x: Tensor, block: Any) -> Any:
    model.head.weight.data = model.head.weight.data * 0.5
    return block(x)


def changes_constant(_: Model, x: Tensor, block: Any) -> Any:
    CONSTANT.view(2, -1).add_(1.0)
    return block(x) + CONSTANT


def backward_inside(_: Model, x: Tensor, block: Any) -> Any:
    block(x).sum().backward()
    return block(x)


def sets_attribute(_: Model, x: Tensor, block: Any) -> Any:
    block.skip = x
    return block(x)


def default_dtype(_: Model, x: Tensor, block: Any) -> Any:
    torch.set_default_dtype(torch.float64)
    return block(x) + torch.ones(WIDTH).float()


def nested_tensor(_: Model, x: Tensor, block: Any) -> Any:
    nested = torch.nested.nested_tensor([x[0], x[1, :2]])
    return block(x) + nested.to_padded_tensor(0.0).mean()


def makes_parameter(_: Model, x: Tensor, block: Any) -> Any:
    return block(x) * nn.Parameter(torch.ones(WIDTH))


def closure(_: Model, x: Tensor, block: Any) -> Any:
    mean = x.mean()
    return block(x, lambda y: y + mean)


def module_as_argument(model: Model, x: Tensor, block: Any) -> Any:
    return block(x, model.head)


class TakesFunction(Block):
    def forward(self, x: Tensor, function: Any) -> Any:  # type: ignore[override]
        function(x)
        return super().forward(x)


class Cache:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class ReturnsCache(Block):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), Cache(x)


def uses_cache(_: Model, x: Tensor, block: Any) -> Any:
    return block(x)[0]


CONSTANT = torch.ones(WIDTH)
CASES = {
    draws_from_python: "draws random numbers from Python or numpy, outside of its layers.*torch's",
    own_generator: LINE + "rand is called with a generator.*use torch's default generator",
    branches_on_chance: LINE + r".*goes on by a random number.*switch this off \(layerdrop=0.0",
    array_of_values: LINE + "a tensor becomes an array of numpy.*name it in opaque=",
    changed_array: LINE + r"the forward changes a tensor of shape \(8,\) in place.*clone of it",
    changes_weight: LINE + r"the forward changes a weight of shape \(3, 8\).*optimizer's step",
    sets_data: LINE + r"the forward sets \.data of a tensor.*after the optimizer's step",
    changes_constant: LINE + "the forward changes a tensor.*register it with register_buffer",
    backward_inside: LINE + r"the forward calls backward\(\) outside of its layers.*opaque=",
    default_dtype: LINE + r"the forward sets the default dtype to torch.float64.*give dtype=",
    nested_tensor: LINE + r"to_padded_tensor is called with a float32\[nested\] tensor.*opaque=",
    makes_parameter: LINE + ".*a module or parameter that the forward has made.*in __init__",
}
IN_ONE_PIECE = {
    sets_attribute: LINE
    + "'blocks.0.skip' is set to a tensor before 'blocks.0' is.*as an argument",
    closure: LINE
    + r"blocks.0 is called with a function that holds a tensor of shape \(\).*opaque=",
    module_as_argument: LINE + "blocks.0 is called with a Linear, whose weights.*own layer",
    uses_cache: LINE + "blocks.0 returns a Cache, in which tensors cannot be followed.*use_cache=",
}
BLOCKS = {closure: TakesFunction, module_as_argument: TakesFunction, uses_cache: ReturnsCache}


@pytest.mark.parametrize("apply", IN_ONE_PIECE, ids=lambda apply: apply.__name__)
def test_it_is_refused_only_if_a_block_has_to_stay_in_one_piece(apply: Any) -> None:
    made = BLOCKS.get(apply, Block)
    kind = type("Opened", (Model,), {"apply_block": apply, "block": lambda _: made()})
    with pytest.raises(ModelError, match=IN_ONE_PIECE[apply]):
        record_model(kind(), batch()[0], {}, opaque=["blocks.0"])
    assert len(assert_parity(kind)) >= 5


@pytest.mark.filterwarnings("ignore:.*prototype:UserWarning")  # of nested tensors
@pytest.mark.parametrize("apply", CASES, ids=lambda apply: apply.__name__)
def test_it_is_refused_when_it_is_recorded(apply: Any) -> None:
    made = BLOCKS.get(apply, Block)
    kind = type("Refused", (Model,), {"apply_block": apply, "block": lambda _: made()})
    model, dtype = kind(), torch.get_default_dtype()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ModelError, match=CASES[apply]):
        opened(model, batch()[0])
    assert all(torch.equal(tensor, before[n]) for n, tensor in model.state_dict().items())
    assert torch.get_default_dtype() == dtype
    assert all(type(block) is made for block in model.blocks)
    assert all(parameter.grad is None for parameter in model.parameters())


class Counts(Model):
    kind: str

    def __init__(self) -> None:
        super().__init__()
        self.count, self.history, self.last = 0, [0], {"x": 0}

    def forward(self, x: Tensor) -> Any:
        setattr(self, self.kind, self.changed())
        return super().forward(x)

    def changed(self) -> Any:
        return self.count + 1


class Appends(Counts):
    kind = "history"

    def changed(self) -> Any:
        self.history.append(len(self.history))
        return self.history


class AddsOne(Counts):
    kind = "count"


class ReplacesBuffer(Model):
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x: Tensor) -> Any:
        self.mean = self.mean * 0.9 + x.mean((0, 1)) * 0.1
        return super().forward(x - self.mean)


@pytest.mark.parametrize(
    ("kind", "name"), [(AddsOne, "count"), (Appends, "history"), (ReplacesBuffer, "mean")]
)
def test_what_is_set_anew_each_time_is_refused_and_as_it_was(kind: type[Model], name: str) -> None:
    model = kind()
    before = getattr(model, name)
    match = f"the forward sets '{kind.__name__}.{name}' anew each time.*return the value"
    with pytest.raises(ModelError, match=match):
        opened(model, batch()[0])
    assert getattr(model, name) is before
    assert name != "history" or before == [0]


def test_a_backward_hook_on_a_module_that_is_cut_is_refused() -> None:
    model = nn.Sequential(Model())
    model[0].register_full_backward_hook(lambda *_: None)
    with pytest.raises(ModelError, match=r"'inner.0' has a backward hook.*on its layers, or na"):
        opened(Wrapper(model), batch()[0])


class Wrapper(nn.Module):
    def __init__(self, module: Any) -> None:
        super().__init__()
        self.inner = module

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit
def test_a_scripted_module_is_refused() -> None:
    model = Model()
    model.blocks[1] = torch.jit.script(nn.Linear(WIDTH, WIDTH))
    with pytest.raises(ModelError, match=r"'blocks.1' is scripted or traced.*torch\.compile"):
        opened(model, batch()[0])


def test_a_lazy_module_has_to_run_before() -> None:
    model = Model()
    model.head = nn.LazyLinear(3)
    with pytest.raises(ModelError, match=r"'head' is a LazyLinear.*call the model once"):
        opened(model, batch()[0])


def test_layers_that_only_some_batches_use_are_refused() -> None:
    class Deep(Model):
        def forward(self, x: Tensor) -> Any:
            y = self.embed(x)
            for block in self.blocks[: 1 + x.shape[1] // 6]:
                y = block(y)
            return self.head(y)

    with opened(Deep(), batch()[0]) as pipe, pytest.raises(ModelError, match="for this batch"):
        pipe.step(*batch(12))


def goes_on_by_layers(_: Model, x: Tensor, block: Any) -> Any:
    y = block(x)
    return y * 2 if float(y.sum()) > 0 else y * 3


def test_another_way_than_the_recorded_one_is_refused_when_it_is_taken() -> None:
    kind = type("Branches", (Model,), {"apply_block": goes_on_by_layers})
    match = LINE + "the model goes on by what its layers compute, as a number.*torch.where.*opaque="
    with opened(kind(), batch()[0]) as pipe, pytest.raises(StageError, match=match):
        pipe.step(-batch()[0], batch()[1])
