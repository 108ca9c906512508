"""Skips: tensors that one layer stashes and a later one pops, in a `GPipe` or without."""

from __future__ import annotations

import copy
import threading
from itertools import product
from typing import Any

import pytest
import torch
from tests.torchgpipe.skip_layers import Commands, Pop, Stash
from torch import Tensor, nn

from stageline.errors import SkipError
from stageline.pipeline import session_of
from stageline.torchgpipe import GPipe
from stageline.torchgpipe.skip import Namespace, pop, skippable, stash, verify_skippables


class Sums(nn.Module):
    """Has a forward without `yield`."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sum(dim=0)


def two_skips() -> nn.Sequential:
    """Two skips of one name, the second within the first."""
    torch.manual_seed(0)
    outer, inner = Namespace(), Namespace()
    return nn.Sequential(
        Stash().isolate(outer),
        nn.Linear(3, 3),
        Stash().isolate(inner),
        nn.ReLU(),
        Pop().isolate(inner),
        Pop().isolate(outer),
    )


@pytest.mark.parametrize(
    ("balance", "checkpoint"),
    [*product([[6], [1, 5], [2, 2, 2], [1] * 6], ["always", "except_last", "never"])],
)
def test_gpipe_gives_the_numbers_of_the_plain_sequence(balance: list[int], checkpoint: str) -> None:
    plain = two_skips()
    options: dict[str, Any] = {"devices": ["cpu"] * len(balance), "checkpoint": checkpoint}
    model = GPipe(copy.deepcopy(plain), balance, chunks=3, **options)
    x = torch.rand(6, 3, requires_grad=True)
    expected = torch.cat([plain(part) for part in x.chunk(3)])
    wanted = torch.autograd.grad(expected.pow(2).sum(), [x, *plain.parameters()])
    output = model(x)
    found = torch.autograd.grad(output.pow(2).sum(), [x, *model.parameters()])
    assert torch.equal(output, expected)
    assert torch.equal(found[0], wanted[0])
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_skip_is_sent_from_where_it_is_stashed_to_where_it_is_popped_and_nowhere_else() -> None:
    layers = [Stash(), nn.Linear(3, 3), nn.Linear(3, 3), Pop()]
    model = GPipe(nn.Sequential(*layers), [1] * 4, devices=["cpu"] * 4, chunks=2)
    model(torch.rand(4, 3))
    (runner,) = model._runners.values()
    stages = session_of(runner.pipe).assembly.stages
    skips = [[v for v in stage.reads if v.name != "x"] for stage in stages]
    assert [len(each) for each in skips] == [0, 0, 0, 1]
    assert skips[3][0].writer == 0


def test_state_has_the_names_of_torchgpipe() -> None:
    model = GPipe(nn.Sequential(Stash(), Pop()), [1, 1], devices=["cpu"] * 2)
    assert "partitions.1.1.module.linear.weight" in model.state_dict()


def test_none_can_be_stashed() -> None:
    layers = nn.Sequential(Stash(value=None), Pop())
    model = GPipe(copy.deepcopy(layers), [1, 1], devices=["cpu"] * 2, chunks=2)
    x = torch.rand(4, 3)
    assert torch.equal(model(x), torch.cat([layers(part) for part in x.chunk(2)]))


def test_a_popped_tensor_may_be_changed_in_place() -> None:
    class AddTo(nn.Module):
        def forward(self, x: Tensor) -> Commands:
            found = yield pop("skip")
            found += x
            return found  # type: ignore[no-any-return]

    layers = [nn.Linear(3, 3), Stash(), skippable(pop=["skip"])(AddTo)()]
    plain = nn.Sequential(*layers)
    x = torch.rand(4, 3)
    expected = torch.cat([plain(part) for part in x.chunk(2)])
    model = GPipe(plain, [1, 1, 1], devices=["cpu"] * 3, chunks=2, checkpoint="always")
    output = model(x)
    output.sum().backward()
    assert torch.equal(output, expected)


def test_skips_may_be_inside_nested_sequences() -> None:
    plain = nn.Sequential(nn.Sequential(nn.ReLU(), Stash()), nn.Sequential(Pop(), Stash(), Pop()))
    x = torch.rand(4, 3)
    expected = torch.cat([plain(part) for part in x.chunk(2)])
    model = GPipe(plain, [1, 1], devices=["cpu"] * 2, chunks=2)
    assert torch.equal(model(x), expected)


def test_two_threads_do_not_see_each_others_skips() -> None:
    """Each call of a plain sequence that fails leaves its skips behind, in its own thread only."""
    stashed: list[Exception] = []

    def work() -> None:
        try:
            Pop()(torch.rand(2, 3))
        except SkipError as error:
            stashed.append(error)

    Stash()(torch.rand(2, 3))
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(stashed) == 1
    Pop()(torch.rand(2, 3))


def undeclared_stash(self: nn.Module, x: Tensor) -> Commands:  # noqa: ARG001
    yield stash("other", x)
    return x


def undeclared_pop(self: nn.Module, x: Tensor) -> Commands:  # noqa: ARG001
    yield pop("other")
    return x


def nothing(self: nn.Module, x: Tensor) -> Tensor:  # noqa: ARG001
    return x


@pytest.mark.parametrize(
    ("declared", "forward", "observed"),
    [
        ({}, undeclared_stash, "stashes 'other', but did not declare it"),
        ({}, undeclared_pop, "pops 'other', but did not declare it"),
        ({"stash": ["skip"]}, nothing, "declared that it stashes 'skip'"),
        ({"pop": ["missing"]}, nothing, "'missing' is popped, but was not stashed before"),
    ],
)
def test_a_layer_stashes_and_pops_just_what_it_declares(
    declared: dict[str, list[str]], forward: Any, observed: str
) -> None:
    layer = skippable(**declared)(type("Layer", (nn.Module,), {"forward": forward}))()
    with pytest.raises(RuntimeError, match=observed):
        layer(torch.ones(1))


def test_other_commands_are_a_type_error() -> None:
    class Yields(nn.Module):
        def forward(self, x: Tensor) -> Commands:
            yield "hello"
            return x

    with pytest.raises(TypeError, match="yielded a str"):
        skippable()(Yields)()(torch.ones(1))


def test_a_skippable_shows_its_module_and_keeps_its_own_name() -> None:
    assert repr(skippable()(Sums)()) == "@skippable(Sums())"
    assert (Stash.__name__, Stash.__module__) == ("_Stash", "tests.torchgpipe.skip_layers")


def test_namespaces_are_equal_to_their_copies_only() -> None:
    namespace = Namespace()
    assert copy.copy(namespace) == namespace
    assert copy.deepcopy(namespace) == namespace
    assert namespace != Namespace()
    assert len({namespace, copy.copy(namespace)}) == 1


@pytest.mark.parametrize(
    ("layers", "observed"),
    [
        ([Stash], "layer '0' stashes 'skip', which no later layer pops"),
        ([Pop], "layer '0' pops 'skip', which no earlier layer stashes"),
        ([Pop, Stash], "layer '0' pops 'skip', which no earlier layer stashes"),
        ([Stash, Stash, Pop], "layer '1' stashes 'skip' again, after layer '0'"),
        ([Stash, Pop, Pop], "layer '2' pops 'skip' again, after layer '1'"),
        ([skippable(stash=["a"], pop=["a"])(Sums)], "layer '0' both stashes and pops 'a'"),
    ],
)
def test_every_skip_is_stashed_once_and_popped_once(layers: list[Any], observed: str) -> None:
    module = nn.Sequential(*(layer() for layer in layers))
    with pytest.raises(TypeError, match=observed):
        verify_skippables(module)
    with pytest.raises(TypeError, match=observed):
        GPipe(module, [len(module)], devices=["cpu"])


def test_all_mistakes_are_told_at_once() -> None:
    with pytest.raises(TypeError) as caught:
        verify_skippables(nn.Sequential(Stash(), Pop(), Stash(), Pop()))
    assert "'2' stashes 'skip' again" in str(caught.value)
    assert "'3' pops 'skip' again" in str(caught.value)


def test_skips_of_one_name_are_isolated_by_namespaces() -> None:
    verify_skippables(two_skips())
    both = skippable(stash=["a", "b"])(Sums)().isolate(Namespace(), only=["a"])
    assert [key.namespace is None for key in both.stashable()] == [False, True]
