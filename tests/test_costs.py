"""Costs in all forms, and the errors for invalid ones."""

import math
import re
from typing import Any

import numpy as np
import pytest

from stageline.costs import PER_STAGE, Costs, Link
from stageline.errors import CostsError, StagelineError
from stageline.schedules.schedule import Schedule
from stageline.simulation.simulate import simulate

every_field = pytest.mark.parametrize("name", PER_STAGE)


def refused(message: str) -> Any:
    return pytest.raises(CostsError, match=f"^{re.escape(message)}$")


def build(**given: Any) -> Costs:
    """Return costs from any value; activations are large enough to retain it."""
    return Costs(**({"activation": 1e9} | given))


def test_a_number_stands_for_every_stage_and_a_list_for_one_each() -> None:
    costs = Costs(forward=2, input_grad=[1, 2.5, 3], weight_grad=(0, 0, 0), transfer=range(3))
    assert costs.per_stage("forward", 3) == (2.0, 2.0, 2.0)
    assert costs.per_stage("input_grad", 3) == (1.0, 2.5, 3.0)
    assert costs.per_stage("weight_grad", 3) == (0.0, 0.0, 0.0)
    assert costs.per_stage("transfer", 3) == (0.0, 1.0, 2.0)


def test_all_of_an_activation_is_retained_by_default() -> None:
    assert Costs(activation=[3, 4]).per_stage("retained", 2) == (3.0, 4.0)
    assert Costs(activation=[3, 4], retained=0).per_stage("retained", 2) == (0.0, 0.0)


def test_costs_with_the_same_numbers_are_equal_however_they_are_given() -> None:
    assert Costs(forward=[1, 2]) == Costs(forward=(1.0, 2.0))
    assert Costs(forward=1) != Costs(forward=[1, 1])


def test_a_list_changed_afterwards_changes_no_costs() -> None:
    forward: list[float] = [1, 2]
    costs = Costs(forward=forward)
    forward[0] = 9
    assert costs.per_stage("forward", 2) == (1.0, 2.0)


@every_field
@pytest.mark.parametrize("value", [-1, -0.5, math.nan, math.inf, -math.inf])
def test_a_cost_out_of_range_is_refused(name: str, value: float) -> None:
    with refused(f"{name} is {value}, but a cost is a finite number >= 0"):
        build(**{name: value})


@every_field
@pytest.mark.parametrize("value", [True, "1.0", {"a": 1}, 1j])
def test_a_cost_that_is_no_number_is_refused(name: str, value: object) -> None:
    with refused(f"{name} is {value!r}, but a cost is a number >= 0"):
        build(**{name: value})


@every_field
@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1, -2], "[1] is -2, but a cost is a finite number >= 0"),
        ([math.nan, 1], "[0] is nan, but a cost is a finite number >= 0"),
        ([1, 1, False], "[2] is False, but a cost is a number >= 0"),
        ([1, "2"], "[1] is '2', but a cost is a number >= 0"),
        ([1, None], "[1] is None, but a cost is a number >= 0"),
        ([[1, 1]], "[0] is [1, 1], but a cost is a number >= 0"),
    ],
)
def test_a_wrong_item_of_a_list_is_refused_with_its_stage(
    name: str, value: object, message: str
) -> None:
    with refused(f"{name}{message}"):
        build(**{name: value})


@pytest.mark.parametrize("name", [name for name in PER_STAGE if name != "retained"])
def test_none_is_no_cost_but_for_retained(name: str) -> None:
    with refused(f"{name} is None, but a cost is a number >= 0"):
        Costs(**{name: None})  # type: ignore[arg-type]  # what is under test


def test_lists_of_different_lengths_are_refused() -> None:
    message = "lengths differ (forward 2, step 3), but every list needs one value per stage"
    with refused(message):
        Costs(forward=[1, 2], transfer=1, step=[1, 2, 3])


@every_field
def test_a_list_for_another_number_of_stages_is_refused(name: str) -> None:
    message = f"{name} has 3 values, but the schedule has 2 stages: give one number, or 2 numbers"
    with refused(message):
        build(**{name: [1, 1, 1]}).per_stage(name, 2)


@pytest.mark.parametrize(
    ("activation", "retained", "message"),
    [
        (1, 2, "retained is 2.0 on stage 0, but"),
        ([5, 1], [5, 2], "retained is 2.0 on stage 1, but"),
        ([5, 1], 2, "retained is 2.0 on stage 1, but"),
        (1, [0, 1, 3], "retained is 3.0 on stage 2, but"),
    ],
)
def test_more_cannot_be_retained_than_there_is(
    activation: Any, retained: Any, message: str
) -> None:
    advice = "it is the part of activation that W needs: use at most 1.0, its activation"
    with pytest.raises(CostsError, match=f"^{re.escape(f'{message} {advice}')}$"):
        Costs(activation=activation, retained=retained)


@pytest.mark.parametrize("latency", [-1, math.nan, math.inf])
def test_a_link_with_a_latency_that_makes_no_sense_is_refused(latency: float) -> None:
    with refused(f"latency is {latency}, but a cost is a finite number >= 0"):
        Link(latency=latency)


@pytest.mark.parametrize("bandwidth", [-1, math.nan, -math.inf])
def test_a_link_with_a_bandwidth_that_makes_no_sense_is_refused(bandwidth: float) -> None:
    with refused(f"bandwidth is {bandwidth}, but a cost is a finite number >= 0"):
        Link(bandwidth=bandwidth)


def test_a_link_that_carries_nothing_is_refused() -> None:
    with refused("bandwidth is 0, but must be positive: use math.inf for no limit"):
        Link(bandwidth=0)


def test_a_link_is_for_one_direction_and_those_not_named_cost_nothing() -> None:
    slow = Link(latency=5, bandwidth=0.1)
    costs = Costs(links={(0, 1): slow})
    assert costs.link(0, 1) == slow
    assert costs.link(1, 0) == costs.link(1, 2) == Link(latency=0, bandwidth=math.inf)


def test_one_link_for_all_joins_ranks_but_no_rank_to_itself() -> None:
    slow = Link(latency=5, bandwidth=0.1)
    costs = Costs(links=slow)
    assert costs.link(0, 1) == costs.link(3, 0) == slow
    assert costs.link(2, 2) == Link()


def test_wrong_costs_are_value_errors_of_stageline() -> None:
    assert issubclass(CostsError, StagelineError)
    assert issubclass(CostsError, ValueError)


@pytest.mark.parametrize("field", ["latency", "bandwidth"])
@pytest.mark.parametrize("value", ["fast", None, True])
def test_a_link_of_no_numbers_is_refused(field: str, value: Any) -> None:
    with pytest.raises(CostsError, match=f"^{field} is {value!r}, but "):
        Link(**{field: value})


@pytest.mark.parametrize(
    "links", [3, None, [Link()], {(0, 1): 3}, {0: Link()}, {"01": Link()}, {(0, 1, 2): Link()}]
)
def test_links_are_one_for_all_or_one_for_each_pair_of_ranks(links: Any) -> None:
    with pytest.raises(
        CostsError, match=r"^links contains .*, but must have a Link for each \(from, to\)"
    ):
        Costs(links=links)


@pytest.mark.parametrize("value", [b"ab", 10**400])
def test_bytes_and_integers_beyond_floats_are_no_costs(value: Any) -> None:
    with pytest.raises(CostsError, match=r"^forward is "):
        Costs(forward=value)


def test_numbers_and_arrays_of_numpy_are_costs() -> None:
    values: Any = np.array([1.0, 2.5]), np.float32(2), np.int64(3)
    assert Costs(*values) == Costs(forward=[1.0, 2.5], input_grad=2.0, weight_grad=3.0)


@pytest.mark.parametrize("name", PER_STAGE)
@pytest.mark.parametrize("rows", [("0F0 0B0", "1F0 1B0"), ("0F0 0B0",)])
def test_costs_for_another_number_of_stages_are_refused_when_simulated(
    rows: tuple[str, ...], name: str
) -> None:
    values: dict[str, Any] = {"activation": 5} | {name: [1, 1, 1]}
    with pytest.raises(CostsError, match=f"^{name} has 3 values, but the schedule has"):
        simulate(Schedule.from_text(*rows), Costs(**values))
