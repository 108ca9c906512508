"""Cuts for one stage per rank, compared with all cuts of small cases."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stageline.errors import PlanError
from stageline.planning.partition import one_stage_per_rank
from stageline.planning.partition.one_stage_per_rank import split_layers
from stageline.planning.partition.partition import balance_by_rule
from stageline.planning.profiling.profile_result import LayerCost, Measurement

Run = tuple[int, int]
numbers = st.integers(0, 12)
many = settings(max_examples=200, deadline=None)


def refused(message: str) -> Any:
    return pytest.raises(PlanError, match=f"^{re.escape(message)}$")


def all_cuts(num_layers: int, num_stages: int) -> Iterator[list[Run]]:
    for cuts in combinations(range(1, num_layers), num_stages - 1):
        yield list(pairwise((0, *cuts, num_layers)))


def runs_of(balance: Sequence[int]) -> list[Run]:
    ends = [sum(balance[:stage]) for stage in range(len(balance) + 1)]
    return list(pairwise(ends))


@st.composite
def chains(draw: st.DrawFn) -> dict[str, Any]:
    """Whole costs, so that sums are exact, and speeds that divide them without rounding."""
    num_layers = draw(st.integers(1, 9))
    num_stages = draw(st.integers(1, num_layers))
    return {
        "costs": draw(st.lists(numbers, min_size=num_layers, max_size=num_layers)),
        "num_stages": num_stages,
        "transfers": draw(
            st.none() | st.lists(numbers, min_size=num_layers - 1, max_size=num_layers - 1)
        ),
        "speeds": draw(
            st.none()
            | st.lists(st.sampled_from([0.5, 1, 2, 4]), min_size=num_stages, max_size=num_stages)
        ),
    }


def stage_costs(runs: Sequence[Run], chain: dict[str, Any]) -> list[float]:
    speeds = chain["speeds"] or [1] * len(runs)
    cuts = [0, *(chain["transfers"] or [0] * (len(chain["costs"]) - 1)), 0]
    return [
        sum(chain["costs"][start:stop]) / speed + cuts[start] + cuts[stop]
        for (start, stop), speed in zip(runs, speeds, strict=True)
    ]


def worth(runs: Sequence[Run], chain: dict[str, Any]) -> tuple[float, float]:
    costs = stage_costs(runs, chain)
    return max(costs), sum(cost**2 for cost in costs)


@st.composite
def limits(draw: st.DrawFn) -> Callable[[int, int, int], bool]:
    """The memory of layers and of stages; part of what fits also fits."""
    sizes = draw(st.lists(numbers, min_size=9, max_size=9))
    memory = draw(st.lists(st.integers(8, 40), min_size=9, max_size=9))
    return lambda start, stop, stage: sum(sizes[start:stop]) <= memory[stage]


@many
@given(chains())
def test_a_split_has_the_least_bottleneck_and_is_the_most_even(chain: dict[str, Any]) -> None:
    balance = split_layers(**chain)
    cuts = all_cuts(len(chain["costs"]), chain["num_stages"])
    assert worth(runs_of(balance), chain) == min(worth(runs, chain) for runs in cuts)


@many
@given(chains(), limits())
def test_a_split_is_the_best_one_that_fits(chain: dict[str, Any], fits: Any) -> None:
    fitting = [
        runs
        for runs in all_cuts(len(chain["costs"]), chain["num_stages"])
        if all(fits(*run, stage) for stage, run in enumerate(runs))
    ]
    if not fitting:
        with pytest.raises(PlanError, match="fits: give more memory"):
            split_layers(**chain, fits=fits)
        return
    runs = runs_of(split_layers(**chain, fits=fits))
    assert runs in fitting
    assert worth(runs, chain) == min(worth(runs, chain) for runs in fitting)


@many
@given(chains(), limits())
def test_the_bottleneck_is_the_least_if_the_most_even_split_takes_too_long(
    chain: dict[str, Any], fits: Any
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one_stage_per_rank, "MAX_STEPS", 0)
        try:
            runs = runs_of(split_layers(**chain, fits=fits))
        except PlanError:
            return
    fitting = (
        runs
        for runs in all_cuts(len(chain["costs"]), chain["num_stages"])
        if all(fits(*run, stage) for stage, run in enumerate(runs))
    )
    assert worth(runs, chain)[0] == min(worth(runs, chain)[0] for runs in fitting)


@many
@given(st.lists(st.floats(0, 1e6), min_size=3, max_size=8), st.integers(1, 3))
def test_a_split_of_any_floats_is_optimal_up_to_rounding(
    costs: list[float], num_stages: int
) -> None:
    chain = {"costs": costs, "transfers": None, "speeds": None}
    best = min(worth(runs, chain)[0] for runs in all_cuts(len(costs), num_stages))
    assert worth(runs_of(split_layers(costs, num_stages)), chain)[0] <= best * (1 + 1e-11)


def test_a_cheap_transfer_outweighs_an_even_split() -> None:
    assert split_layers([1, 1, 1, 1], 2) == (2, 2)
    assert split_layers([1, 1, 1, 1], 2, transfers=[0, 5, 5]) == (1, 3)


def test_a_fast_device_gets_more_layers() -> None:
    assert split_layers([1] * 8, 2, speeds=[3, 1]) == (6, 2)


def test_a_stage_with_little_memory_gets_fewer_layers() -> None:
    limit = [2, 9, 9]
    assert split_layers([1] * 9, 3, fits=lambda i, j, stage: j - i <= limit[stage]) == (
        2,
        3,
        4,
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"costs": [1, 1], "num_stages": 3},
            (
                "there are 2 layers, but 3 stages need at least one each: "
                "use fewer ranks or chunks, or divide the model into smaller layers"
            ),
        ),
        (
            {"costs": [], "num_stages": 1},
            (
                "there are 0 layers, but 1 stages need at least one each: "
                "use fewer ranks or chunks, or divide the model into smaller layers"
            ),
        ),
        ({"costs": [1], "num_stages": 0}, "num_stages is 0, but has to be at least 1"),
        (
            {"costs": [1, -2], "num_stages": 1},
            "costs[1] is -2, but has to be finite and at least 0",
        ),
        (
            {"costs": [1, float("nan")], "num_stages": 1},
            "costs[1] is nan, but has to be finite and at least 0",
        ),
        (
            {"costs": [1, 1], "num_stages": 2, "speeds": [1, 0]},
            "speeds[1] is 0, but has to be finite and above 0",
        ),
        (
            {"costs": [1, 1], "num_stages": 2, "transfers": [1, 1]},
            "transfers has 2 numbers, but needs 1",
        ),
        (
            {"costs": [1, 1], "num_stages": 2, "fits": lambda *_: False},
            (
                "no cut of 2 layers into 2 stages fits: "
                "give more memory or more stages, or recompute activations"
            ),
        ),
    ],
)
def test_invalid_arguments_of_a_split_are_refused(given: dict[str, Any], message: str) -> None:
    with refused(message):
        split_layers(**given)


def measured(times: Sequence[float], sizes: Sequence[float] = ()) -> Measurement:
    return Measurement(
        1,
        tuple(
            LayerCost(time, 0, 0, size, 0, 0, 0)
            for time, size in zip(times, sizes or [0] * len(times), strict=True)
        ),
        (),
    )


def test_balance_by_time_and_by_size() -> None:
    measurement = measured([9, 1, 1, 1], sizes=[1, 1, 1, 9])
    assert balance_by_rule("time", measurement, 2) == (1, 3)
    assert balance_by_rule("size", measurement, 2) == (3, 1)


def test_by_size_a_parameter_counts_four_times() -> None:
    kept, owned = LayerCost(0, 0, 0, 5, 0, 0, 0), LayerCost(0, 0, 0, 0, 0, 1, 0)
    assert balance_by_rule("size", Measurement(1, (kept, kept, owned), ()), 2) == (1, 2)  # 5 | 9
    assert balance_by_rule("size", Measurement(1, (kept, kept, owned, owned), ()), 2) == (2, 2)


@many
@given(st.lists(numbers, min_size=1, max_size=9), st.data())
def test_balance_by_variance_has_the_least_variance_of_all_cuts(
    times: list[int], data: st.DataObject
) -> None:
    num_stages = data.draw(st.integers(1, len(times)))
    chain = {"costs": times, "transfers": None, "speeds": None}
    balance = balance_by_rule("variance", measured(times), num_stages)
    least = min(worth(runs, chain)[1] for runs in all_cuts(len(times), num_stages))
    assert worth(runs_of(balance), chain)[1] == least


def test_the_least_variance_may_have_a_larger_bottleneck() -> None:
    assert balance_by_rule("time", measured([1, 5, 2, 3]), 3) == (1, 1, 2)  # 1 | 5 | 5
    assert balance_by_rule("variance", measured([1, 5, 2, 3]), 3) == (2, 1, 1)  # 6 | 2 | 3


def test_an_unknown_rule_is_refused() -> None:
    with refused("the rule is 'weight', but has to be one of time, size, variance"):
        balance_by_rule("weight", measured([1]), 1)
