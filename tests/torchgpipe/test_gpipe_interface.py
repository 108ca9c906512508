"""`stageline.torchgpipe.GPipe` has the interface of torchgpipe's."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stageline.errors import BalanceError, BatchError
from stageline.torchgpipe import GPipe, is_checkpointing, is_recomputing
from stageline.torchgpipe.gpipe import verify_module

CPU = torch.device("cpu")


def small() -> nn.Sequential:
    torch.manual_seed(0)
    named = [("a", nn.Linear(4, 8)), ("b", nn.ReLU()), ("c", nn.Linear(8, 1))]
    return nn.Sequential(OrderedDict[str, nn.Module](named))


def gpipe(balance: list[int], **options: Any) -> GPipe:
    return GPipe(small(), balance, devices=["cpu"] * len(balance), **options)


def test_attributes_are_those_that_were_given() -> None:
    given: dict[str, Any] = {"chunks": 4.0, "checkpoint": "always"}
    model = GPipe(small(), (2, 1), devices=("cpu", "cpu", "cpu"), **given)
    assert (model.balance, model.devices) == ([2, 1], [CPU, CPU])
    assert (model.chunks, model.checkpoint) == (4, "always")
    assert isinstance(model.chunks, int)


def test_defaults_are_one_chunk_and_recomputation_except_in_the_last() -> None:
    model = gpipe([3])
    assert (model.chunks, model.checkpoint) == (1, "except_last")


@pytest.mark.parametrize("balance", [[3], [1, 2], [1, 1, 1]])
def test_it_is_indexed_as_the_sequence_that_it_wraps(balance: list[int]) -> None:
    plain = small()
    model = GPipe(plain, balance, devices=["cpu"] * len(balance))
    assert len(model) == 3
    assert [*model] == [*plain]
    assert [model[i] for i in range(-3, 3)] == [plain[i] for i in range(-3, 3)]
    for index in (3, -4):
        with pytest.raises(IndexError):
            model[index]
    with pytest.raises(AttributeError):
        model.a  # noqa: B018


def test_names_of_the_state_are_those_of_torchgpipe() -> None:
    model = gpipe([2, 1])
    assert isinstance(model.partitions, nn.ModuleList)
    assert [*model.state_dict()] == [
        *("partitions.0.a.weight", "partitions.0.a.bias"),
        *("partitions.1.c.weight", "partitions.1.c.bias"),
    ]


@pytest.mark.parametrize(
    ("options", "observed"),
    [
        ({"balance": None}, "balance is missing"),
        ({"balance": [2]}, "adds up to 2 layers, but the module has 3"),
        ({"balance": [4]}, "adds up to 4 layers"),
        ({"balance": [0, 3]}, "needs at least one layer"),
        ({"balance": [-1, 4]}, "needs at least one layer"),
        ({"chunks": 0}, "chunks is 0"),
        ({"checkpoint": "sometimes"}, "checkpoint is 'sometimes', but takes one of 'always'"),
    ],
)
def test_wrong_arguments_are_value_errors(options: dict[str, Any], observed: str) -> None:
    defaults: dict[str, Any] = {"balance": [2, 1], "devices": ["cpu"] * 2}
    with pytest.raises(ValueError, match=observed):
        GPipe(small(), **defaults | options)


def test_a_wrong_balance_is_a_balance_error_that_tells_how_to_find_one() -> None:
    with pytest.raises(BalanceError, match=r"stageline\.torchgpipe\.balance"):
        gpipe([1])


def test_too_few_devices_are_an_index_error() -> None:
    with pytest.raises(IndexError, match="there are 1 devices, but 2 partitions"):
        GPipe(small(), [2, 1], devices=["cpu"])


def test_only_a_sequence_of_layers_that_share_nothing_is_taken() -> None:
    linear = nn.Linear(2, 2)
    tied = nn.Linear(2, 2)
    tied.weight = linear.weight
    with pytest.raises(TypeError, match="is of type ModuleList, but GPipe splits"):
        verify_module(nn.ModuleList([linear]))
    with pytest.raises(ValueError, match="is in the module twice"):
        verify_module(nn.Sequential(linear, linear))
    with pytest.raises(ValueError, match="share a parameter"):
        verify_module(nn.Sequential(linear, tied))


def test_moving_is_refused_and_casting_is_not() -> None:
    model = gpipe([2, 1], chunks=2)
    model(torch.ones(4, 4)).sum().backward()
    for where in ("cpu", "cuda", 0, CPU, torch.ones(1)):
        with pytest.raises(TypeError, match="was asked to move"):
            model.to(where)
    for named in ({"device": "cpu"}, {"tensor": torch.ones(1)}):
        with pytest.raises(TypeError, match="was asked to move"):
            model.to(**named)
    for move in (model.cuda, model.cpu):
        with pytest.raises(TypeError, match="was asked to move"):
            move()
    assert model.to(torch.double) is model
    assert model(torch.ones(4, 4).double()).dtype is torch.double
    assert model.to(dtype=torch.float).half()[0].weight.dtype is torch.half


def test_a_sequence_without_layers_returns_its_input() -> None:
    model = GPipe(nn.Sequential(), [])
    x = torch.tensor(42)
    assert model(x) is x
    assert model((x,)) == (x,)
    with pytest.raises(TypeError, match="input is of type int"):
        model(42)


@pytest.mark.parametrize("given", ["hello", [torch.ones(2, 4)], (torch.ones(2, 4), "hello")])
def test_inputs_that_are_no_tensors_are_type_errors(given: Any) -> None:
    with pytest.raises(TypeError, match="the input is of type"):
        gpipe([3])(given)


@pytest.mark.parametrize("returned", ["hello", {"y": torch.ones(2)}, (torch.ones(2), None)])
def test_outputs_that_are_no_tensors_are_type_errors(returned: Any) -> None:
    class Returns(nn.Module):
        def forward(self, _: Tensor) -> Any:
            return returned

    with pytest.raises(TypeError, match="output"):
        GPipe(nn.Sequential(Returns()), [1], devices=["cpu"])(torch.ones(2))


def test_inputs_that_give_different_numbers_of_micro_batches_are_refused() -> None:
    """torchgpipe drops the rest of the longer one."""
    with pytest.raises(BatchError, match="lengths of the inputs along dim 0 are 8, 3"):
        gpipe([3], chunks=4)((torch.ones(8, 4), torch.ones(3, 4)))


def test_tuples_go_in_and_come_out_with_their_gradients() -> None:
    class Swap(nn.Module):
        def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
            a, b = pair
            return b * 3, a * 2, a.argmax(dim=1)

    class Keep(nn.Module):
        def forward(self, values: tuple[Tensor, ...]) -> list[Tensor]:
            return [*values]

    model = GPipe(nn.Sequential(Swap(), Keep()), [1, 1], devices=["cpu", "cpu"], chunks=3)
    a, b = torch.rand(7, 2, requires_grad=True), torch.rand(7, 2, requires_grad=True)
    output = model((a, b))
    assert isinstance(output, tuple)
    assert [t.requires_grad for t in output] == [True, True, False]
    assert torch.equal(output[2], a.argmax(dim=1))
    (output[0].sum() + output[1].sum()).backward()
    assert torch.equal(torch.stack([a.grad, b.grad])[:, 0, 0], torch.tensor([2.0, 3.0]))  # type: ignore[list-item]


def test_samples_are_cut_as_torch_chunk_does() -> None:
    seen: list[int] = []

    class Length(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(len(x))
            return x

    model = GPipe(nn.Sequential(Length()), [1], devices=["cpu"], chunks=4, checkpoint="never")
    for length in (10, 9, 2):
        assert len(model(torch.ones(length))) == length
    assert seen == [3, 3, 3, 1, 3, 3, 3, 1, 1]


@pytest.mark.parametrize(
    ("checkpoint", "forwards", "recomputed"),
    [("always", [True] * 3, 3), ("except_last", [True, True, False], 2), ("never", [False] * 3, 0)],
)
def test_a_layer_knows_whether_it_is_recomputed(
    checkpoint: str, forwards: list[bool], recomputed: int
) -> None:
    seen: list[tuple[bool, bool]] = []

    class Ask(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append((is_checkpointing(), is_recomputing()))
            return x

    model = GPipe(
        nn.Sequential(nn.Linear(2, 2), Ask()), [1, 1], devices=["cpu"] * 2, chunks=3,
        checkpoint=checkpoint,
    )  # fmt: skip
    y = model(torch.ones(6, 2))
    assert seen == [(first, False) for first in forwards]
    y.sum().backward()
    assert seen[3:] == [(False, True)] * recomputed
    del seen[:]
    model.eval()(torch.ones(6, 2)).sum().backward()
    assert seen == [(False, False)] * 3
    assert not is_checkpointing()
    assert not is_recomputing()


def test_chunks_and_checkpoint_may_be_changed_between_calls() -> None:
    model = gpipe([2, 1], chunks=2)
    x = torch.rand(8, 4)
    before = model(x)
    model.chunks, model.checkpoint = 4, "always"
    after = model(x)
    assert torch.allclose(before, after)
    after.sum().backward()
    before.sum().backward()  # of the pipeline that was in use then


def test_copies_and_pickles_are_models_of_their_own() -> None:
    model = gpipe([2, 1], chunks=2)
    x = torch.rand(4, 4)
    expected = model(x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        found = other(x)
        assert torch.equal(found, expected)
        found.sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())
