"""Models as layers, and layers split into stages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from stageline.errors import ModelError
from stageline.model.layers import INPUT, Layer, LayerSequence, Value
from stageline.model.split import balanced_sizes, cut


def test_nested_sequentials_become_layers_with_the_names_of_their_modules() -> None:
    linear = nn.Linear(3, 3)
    inner = nn.Sequential(nn.ReLU(), nn.Sequential(linear))
    layers = LayerSequence.of(nn.Sequential(nn.Linear(2, 3), inner))
    assert [layer.name for layer in layers.layers] == ["0", "1.0", "1.1.0"]
    assert layers.layers[2].module is linear


def test_a_module_used_twice_in_a_sequential_is_two_layers() -> None:
    relu = nn.ReLU()
    layers = LayerSequence.of(nn.Sequential(relu, nn.Linear(2, 2), relu))
    assert [layer.name for layer in layers.layers] == ["0", "1", "2"]


def test_a_list_can_mix_modules_and_layers() -> None:
    layers = LayerSequence.of([nn.ReLU(), Layer("join", nn.ReLU(), ("x", "mask")), nn.Tanh()])
    assert [layer.name for layer in layers.layers] == ["0", "join", "2"]


def test_a_layer_reads_the_latest_value_of_a_name() -> None:
    relu = nn.ReLU()
    layers = LayerSequence(
        (
            Layer("a", relu, ("x",), ("x", "skip")),
            Layer("b", relu, ("x",), ("x",)),
            Layer("c", relu, ("x", "skip", "mask"), ("x",)),
        )
    )
    assert layers.sources == (
        (Value(INPUT, "x"),),
        (Value(0, "x"),),
        (Value(1, "x"), Value(0, "skip"), Value(INPUT, "mask")),
    )


def test_a_module_that_is_no_sequential_is_an_error() -> None:
    with pytest.raises(ModelError, match=r"^the model is a LSTM, but .*nn.Sequential"):
        LayerSequence.of(nn.LSTM(8, 8))


def chain(num_layers: int) -> LayerSequence:
    return LayerSequence.of(nn.Sequential(*(nn.Linear(2, 2) for _ in range(num_layers))))


def test_balance_says_how_many_layers_each_stage_takes() -> None:
    assert cut(chain(5), 3, [1, 3, 1]) == (range(1), range(1, 4), range(4, 5))


@pytest.mark.parametrize("balance", [[1, 1], [2, 3, 0], [5], [1, 1, 4], [-1, 3, 3]])
def test_a_balance_that_does_not_add_up_is_an_error(balance: list[int]) -> None:
    with pytest.raises(ModelError, match="5 layers on 3 stages need 3 numbers from 1 up"):
        cut(chain(5), 3, balance)


def test_fewer_layers_than_stages_is_an_error() -> None:
    with pytest.raises(ModelError, match=r"^the model has 2 layers, but 3 stages need one each"):
        cut(chain(2), 3)


@given(
    costs=st.lists(st.integers(0, 20), min_size=1, max_size=9),
    num_stages=st.integers(1, 9),
)
def test_no_cut_has_a_smaller_largest_stage(costs: list[int], num_stages: int) -> None:
    if num_stages > len(costs):
        return

    def largest(first: int, stages: int) -> int:
        if stages == 1:
            return sum(costs[first:])
        ends = range(first + 1, len(costs) - stages + 2)
        return min(max(sum(costs[first:end]), largest(end, stages - 1)) for end in ends)

    sizes = balanced_sizes(costs, num_stages)
    assert len(sizes) == num_stages
    assert min(sizes) >= 1
    assert sum(sizes) == len(costs)
    ends = [sum(sizes[: i + 1]) for i in range(num_stages)]
    found = max(sum(costs[end - size : end]) for end, size in zip(ends, sizes, strict=True))
    assert found == largest(0, num_stages)


class Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + super().forward(x)  # type: ignore[no-untyped-call]
        return result


def test_a_sequential_with_a_forward_or_hooks_of_its_own_is_one_layer() -> None:
    hooked = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    hooked.register_forward_hook(lambda *_: None)
    layers = LayerSequence.of(nn.Sequential(Residual(nn.Linear(2, 2), nn.Tanh()), hooked))
    assert [layer.name for layer in layers.layers] == ["0", "1"]
    with pytest.raises(ModelError, match="the model is a Residual, but a pipeline needs"):
        LayerSequence.of(Residual(nn.Linear(2, 2)))


def test_two_layers_with_one_name_are_an_error() -> None:
    with pytest.raises(ModelError, match="2 layers are called '1': give each its own name"):
        LayerSequence.of([Layer("1", nn.ReLU()), nn.ReLU()])
