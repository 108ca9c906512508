"""`pipe(x)` returns one output for a batch, in containers of any kind."""

from __future__ import annotations

from collections import OrderedDict, UserDict, deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils import _pytree as pytree

from stageline.errors import BatchError
from stageline.model.trees import tensors
from stageline.pipeline import Pipeline
from stageline.runtime.batches.microbatches import join

BACKENDS = ("serial", "threads")


@dataclass
class Output:
    logits: Any
    loss: Any = None
    hidden: Any = ()


@dataclass(frozen=True)
class Frozen:
    logits: Any
    name: str = field(default="frozen", init=False)


class Pair(NamedTuple):
    logits: Any
    other: Any


class ModelOutput(OrderedDict[str, Any]):
    """A registered class that omits fields that are None, as those of transformers."""


pytree.register_pytree_node(
    ModelOutput,
    lambda node: (list(node.values()), list(node.keys())),
    lambda values, keys: ModelOutput(zip(keys, values, strict=True)),
)


class Encoding(UserDict[str, Any]):
    pass


class Dotted(dict[str, Any]):
    pass


@dataclass
class Registered:
    logits: Any
    loss: Any = None


pytree.register_dataclass(Registered)

CONTAINERS: dict[str, Any] = {
    "dataclass": lambda x: Output(x, None, (x + 1, [x * 2])),
    "frozen": Frozen,
    "named tuple": lambda x: Pair(x, None),
    "registered": lambda x: ModelOutput(logits=x, hidden=(x,)),
    "registered dataclass": Registered,
    "user dict": lambda x: Encoding(logits=x, kind="b"),
    "dict subclass": lambda x: Dotted(z=x, a=Output(x)),
    "deque": lambda x: deque([x, x + 1]),
    "nested": lambda x: {"a": [Pair(x, Output(x.argmax(1)))], "b": (1, "text", None, 2.5)},
}


class Wrap(nn.Module):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor) -> Any:
        return self.make(x)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CONTAINERS)
def test_all_micro_batches_come_back_in_the_model_s_own_containers(name: str, backend: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), Wrap(CONTAINERS[name]))
    pipe = Pipeline(model, mse_loss, num_ranks=2, num_microbatches=3, backend=backend)
    x = torch.randn(7, 4)
    with torch.no_grad():
        wanted = model(x)
    for found in (pipe(x), pipe.eval()(x)):
        assert type(found) is type(wanted)
        assert str(found).count("None") == str(wanted).count("None")
        assert len(tensors(found)) == len(tensors(wanted))
        for a, b in zip(tensors(found), tensors(wanted), strict=True):
            assert torch.allclose(a, b)
    pipe.close()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CONTAINERS)
def test_such_containers_pass_between_stages_and_to_the_loss(name: str, backend: str) -> None:
    def loss(output: Any, target: Tensor) -> Tensor:
        return mse_loss(tensors(output)[0], target)

    torch.manual_seed(0)
    wrap = Wrap(CONTAINERS[name])
    layers = [nn.Linear(4, 3), wrap, Wrap(lambda tree: tensors(tree)[0] * 2), nn.Linear(3, 3), wrap]
    pipe = Pipeline(
        layers, loss, num_ranks=3, num_microbatches=3, schedule="zb_h1", backend=backend
    )
    pipe.verify(torch.randn(7, 4), torch.randn(7, 3))
    pipe.close()


def test_a_batch_may_be_a_dataclass_and_so_may_its_target() -> None:
    def loss(output: Output, target: Output) -> Tensor:
        assert len(output.logits) == len(target.logits) == 2
        return mse_loss(output.logits, target.logits)

    layers = [Wrap(lambda batch: batch.logits), nn.Linear(4, 3), Wrap(Output)]
    pipe = Pipeline(layers, loss, num_ranks=2, num_microbatches=3, backend="serial")
    pipe.verify(Output(torch.randn(6, 4)), Output(torch.randn(6, 3)))


class Opaque:
    def __init__(self, x: Any) -> None:
        self.x = x


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        (
            [Output(torch.ones(2), None), Output(torch.ones(2), torch.ones(2))],
            r"None in micro-batch 0 and a tensor of shape \(2,\) and torch.float32 in 1 at \.loss",
        ),
        (
            [Output(torch.ones(2), hidden=[1, 2]), Output(torch.ones(2), hidden=[1])],
            r"a list of 2 \(.*\) in micro-batch 0 and a list of 1 \(\[0\]\) in 1 at \.hidden",
        ),
        (
            [Registered(torch.ones(2)), Registered(torch.ones(2), torch.ones(2))],
            r"a Registered of 1 \(logits\) in micro-batch 0 and a Registered of 2 \(logits, loss\)",
        ),
        ([{"a": [(1,)]}, {"a": [(2,)]}], r"1 in micro-batch 0 and 2 in 1 at \['a'\]\[0\]\[0\]"),
        ([{"a": 1}, {"b": 1}], r"a dict of 1 \(\['a'\]\) in micro-batch 0 and a dict of 1"),
        ([True, 1], "True in micro-batch 0 and 1 in 1, but"),
        ([1, (1,)], r"a tensor or another leaf in micro-batch 0 and a tuple of 1 \(\[0\]\) in 1"),
        ([Opaque(torch.ones(2))] * 2, "a Opaque with tensors or arrays in it, but .*: put its ten"),
        ([(Opaque(1),), (Opaque(1),)], r"a <class .*Opaque'> in micro-batch 0 .* in 1 at \[0\]"),
        ([torch.ones(2), torch.ones(2).int()], r"shape \(2,\) and torch.int32 in 1, but"),
        ([torch.ones(2, 5), torch.ones(2, 6)], r"shape \(2, 6\) and torch.float32 in 1, but"),
        ([{"l": torch.ones(())}] * 2, r"a tensor without dimensions at \['l'\], but .* one value"),
        ([torch.randn(5, 2), torch.randn(5, 2)], "samples seem to be along dim 1, .*samples first"),
        ([torch.randn(6, 2, 4), torch.randn(6, 2, 4)], "samples seem to be along dim 1"),
        ([torch.randn(3, 4, 2), torch.randn(3, 4, 2)], "samples seem to be along dim 2"),
    ],
)
def test_outputs_that_cannot_be_joined_are_refused_with_their_path(
    pieces: list[Any], message: str
) -> None:
    with pytest.raises(BatchError, match=message):
        join(pieces, [2, 2])


def test_rows_may_be_tokens_or_selected_by_a_mask() -> None:
    assert join([torch.ones(6, 4), torch.ones(3, 4)], [2, 1]).shape == (9, 4)
    assert join([torch.ones(3, 4), torch.ones(0, 4)], [2, 2]).shape == (3, 4)
    assert join([torch.ones(0, 4), torch.ones(0, 4)], [2, 2]).shape == (0, 4)
    assert join([torch.ones(2, 2), torch.ones(2, 2)], [2, 2]).shape == (4, 2)


def test_an_output_that_does_not_depend_on_samples_is_kept_once() -> None:
    positions = torch.arange(5)
    assert torch.equal(join([{"p": positions}] * 3, [2, 2, 1])["p"], positions)
    nan = float("nan")
    same: Any = (1, "a", None, 2.5, torch.float32, nan, Output(None))
    assert str(join([same, same], [2, 1])) == str(same)
    assert str(join([nan, float("nan")], [2, 1])) == "nan"


def test_a_constant_among_outputs_has_its_gradient_once() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.randn(5))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x * 2, self.scale * 3

    model = Scaled()
    pipe = Pipeline([model], mse_loss, num_ranks=1, num_microbatches=3, backend="serial")
    x, scale = pipe(torch.randn(6, 4))
    assert scale.shape == (5,)
    (x.sum() + scale.sum()).backward()
    assert torch.equal(model.scale.grad, torch.full((5,), 3.0))  # type: ignore[arg-type]


@pytest.mark.parametrize("where", ["inputs", "target"])
def test_a_batch_with_tensors_that_cannot_be_cut_is_refused(where: str) -> None:
    pipe = Pipeline([nn.Linear(4, 3)], mse_loss, num_ranks=1, num_microbatches=2, backend="serial")
    x, y = torch.randn(4, 4), torch.randn(4, 3)
    for hidden in (Opaque([x]), {"a": Opaque({"b": x})}, (x, {Opaque(x)}), (x, x.numpy())):
        batch: Any = (hidden, (x, y)) if where == "inputs" else (x, (y, hidden))
        with pytest.raises(BatchError, match="tensors or arrays in it would not be cut"):
            pipe.step(*batch)
