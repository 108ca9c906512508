"""The search for given costs: as good as the papers or better, within memory, repeatable."""

from __future__ import annotations

import csv
import io
import itertools
from pathlib import Path
from typing import Any

import pytest

from stageline.costs import Costs
from stageline.errors import ScheduleError, StagelineError
from stageline.report.timeline import Timeline
from stageline.schedules.build import build_schedule
from stageline.schedules.check import check
from stageline.schedules.placement import wave
from stageline.schedules.schedule import Schedule
from stageline.schedules.search.budget import (
    MOST_SECONDS,
    NUM_TIMINGS,
    TASKS_PER_SECOND,
    SearchBudget,
)
from stageline.schedules.search.search import search_schedule
from stageline.simulation.simulate import simulate

# Rows of tables 5 and 8 of arXiv 2401.10241; hidden size and heads of its models.
RATES = Path(__file__).parents[1] / "figures" / "zero_bubble_rates.csv"
ROWS = list(csv.DictReader(RATES.read_text().splitlines()))
MODELS = {"1.5B": (2304, 24), "6.2B": (4096, 32), "14.6B": (5120, 40), "28.3B": (6144, 48)}
SEQUENCE = 1024


def row_costs(row: dict[str, str], chunks: int) -> Costs:
    """Return costs with the times of the row, and memory as the paper counts it, by chunk."""
    hidden, heads = MODELS[row["model"]]
    activation, retained = 34 * hidden + 5 * heads * SEQUENCE, 32 * hidden
    forward, input_grad, weight_grad, transfer = (float(row[name]) for name in "FBWc")
    return Costs(
        forward,
        input_grad,
        weight_grad,
        transfer,
        activation=activation / chunks,
        retained=retained / chunks,
    )


def build_for_row(name: str, row: dict[str, str], costs: Costs) -> Timeline:
    schedule = build_schedule(
        name, num_ranks=int(row["p"]), num_microbatches=int(row["m"]), costs=costs
    )
    return simulate(schedule, costs)


@pytest.mark.parametrize("row", [row for row in ROWS if row["r_zb_2p"]], ids=lambda r: r["model"])
@pytest.mark.slow
def test_zb_2p_is_no_higher_than_the_paper(row: dict[str, str]) -> None:
    costs = row_costs(row, 1)
    timeline = build_for_row("zb_2p", row, costs)
    assert round(timeline.span_bubble, 4) <= float(row["r_zb_2p"])
    limit = 2 * int(row["p"]) * costs.per_stage("activation", 1)[0]
    assert max(timeline.peak_activations) <= limit * (1 + 1e-9)


@pytest.mark.parametrize("row", [row for row in ROWS if row["r_zbv"]], ids=lambda r: r["model"])
@pytest.mark.slow
def test_zbv_is_no_higher_than_the_paper(row: dict[str, str]) -> None:
    costs = row_costs(row, 2)
    timeline = build_for_row("zbv", row, costs)
    assert round(timeline.span_bubble, 4) <= float(row["r_zbv"])
    limit = int(row["p"]) * 2 * costs.per_stage("activation", 1)[0]
    assert max(timeline.peak_activations) <= limit * (1 + 1e-9)


def uneven(num_stages: int) -> Costs:
    """Return costs with a large embedding first, a larger head last, and different layers."""
    forward = [1.4, *(1 + 0.1 * (stage % 3) for stage in range(num_stages - 2)), 1.8]
    return Costs(forward, [1.1 * f for f in forward], [0.7 * f for f in forward], 0.05)


@pytest.mark.parametrize("limit", [1, 2, 4, 8, 16])
@pytest.mark.parametrize(("placement", "num_stages"), [("straight", 4), ("v", 8)])
def test_any_memory_limit_is_kept(placement: str, num_stages: int, limit: int) -> None:
    costs = uneven(num_stages)
    schedule = search_schedule(4, 12, costs, limit, placement=placement)
    check(schedule)
    chunks = num_stages // 4
    assert max(simulate(schedule, costs).peak_activations) <= limit * chunks * (1 + 1e-9)


def test_more_memory_never_makes_it_slower() -> None:
    costs = uneven(4)
    spans = [
        max(simulate(search_schedule(4, 12, costs, limit), costs).rank_spans)
        for limit in (1, 2, 3, 4, 6, 8, 12)
    ]
    assert spans == sorted(spans, reverse=True)


@pytest.mark.parametrize("name", ["zb_h1", "zb_h2", "1f1b"])
def test_it_is_at_least_as_good_as_hand_made_schedules_in_their_own_memory(name: str) -> None:
    costs = uneven(4)
    hand_made = simulate(build_schedule(name, num_ranks=4, num_microbatches=12), costs)
    searched = search_schedule(4, 12, costs, max(hand_made.peak_activations))
    assert max(simulate(searched, costs).rank_spans) <= max(hand_made.rank_spans) * (1 + 1e-9)


def test_the_same_call_gives_the_same_schedule() -> None:
    def once(seed: int) -> Schedule:
        return search_schedule(4, 16, uneven(8), 3, placement="v", seed=seed)

    assert once(7) == once(7)


def test_a_longer_search_is_no_worse() -> None:
    costs = uneven(8)
    short, long = (
        simulate(search_schedule(4, 16, costs, 2, placement="v", time_budget=seconds), costs)
        for seconds in (0.01, 2.0)
    )
    assert max(long.rank_spans) <= max(short.rank_spans)


def test_optimal_is_recognised_by_the_bound() -> None:
    timeline = simulate(build_schedule("zb_2p", num_ranks=4, num_microbatches=12))
    assert max(timeline.rank_spans) == pytest.approx(timeline.span_lower_bound)
    assert timeline.span_bubble == pytest.approx(0)


def test_zbv_without_costs_is_the_hand_made_one_and_with_costs_is_searched() -> None:
    hand_made, searched = (
        build_schedule("zbv", num_ranks=4, num_microbatches=8, costs=costs)
        for costs in (None, uneven(8))
    )
    assert hand_made.placement == searched.placement == wave(4)
    assert hand_made != searched


def test_a_limit_in_bytes_leaves_room_for_what_is_not_activations() -> None:
    gib = 1024.0**3
    costs = Costs(activation=gib, parameters=2 * gib, gradients=2 * gib, optimizer_state=4 * gib)
    timeline = simulate(search_schedule(4, 12, costs, "11GiB"), costs)
    assert max(timeline.peak_activations) == 3 * gib
    assert max(timeline.peak_memory) == 11 * gib


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        ("8.5GiB", "rank 0 needs 8GiB before its first activation and 1GiB for one micro-batch"),
        ("a lot", "'a lot' is not a size in bytes: write it like '22GiB'"),
        (0.5, "memory_limit is 0.5 micro-batches, but a rank needs at least 1"),
        (22 * 1024**3, "write bytes as text, such as '22GiB'"),
    ],
)
def test_an_impossible_limit_says_what_is_needed(limit: float | str, message: str) -> None:
    gib = 1024.0**3
    costs = Costs(activation=gib, parameters=2 * gib, gradients=2 * gib, optimizer_state=4 * gib)
    with pytest.raises(ScheduleError) as error:
        search_schedule(4, 8, costs, limit)
    assert message in str(error.value)


def test_several_chunks_in_a_loop_are_searched_as_well() -> None:
    costs = uneven(8)
    schedule = search_schedule(4, 8, costs, 8, chunks_per_rank=2)
    assert schedule.placement == (0, 1, 2, 3) * 2
    interleaved = build_schedule("interleaved_1f1b", num_ranks=4, num_microbatches=8)
    ours, theirs = (max(simulate(s, costs).rank_spans) for s in (schedule, interleaved))
    assert ours <= theirs


def test_a_v_takes_an_even_number_of_chunks() -> None:
    with pytest.raises(ScheduleError, match=r"chunks_per_rank is 3, but a V has two, .*: use 4"):
        search_schedule(4, 8, placement="v", chunks_per_rank=3)
    with pytest.raises(ScheduleError, match="placement is 'w', but must be 'straight' or 'v'"):
        search_schedule(4, 8, placement="w")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_ranks": 0}, "num_ranks is 0, but has to be a whole number from 1 up"),
        ({"num_microbatches": 2.5}, "num_microbatches is 2.5, but has to be a whole number"),
        ({"chunks_per_rank": -2}, "chunks_per_rank is -2, but has to be a whole number"),
        ({"time_budget": 0}, "time_budget is 0, but has to be a number of seconds above 0"),
        ({"time_budget": "1"}, "time_budget is '1', but has to be a number of seconds above 0"),
        ({"costs": {"forward": 1}}, "costs is {'forward': 1}, but has to be a Costs: use sl.Costs"),
        ({"memory_limit": [3]}, "memory_limit is [3], but has to be a number or text"),
        (
            {"memory_limit": "6GiB"},
            "an activation takes 1 bytes: give costs with activation in",
        ),
    ],
)
def test_wrong_arguments_are_told_at_the_door(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(StagelineError) as error:
        search_schedule(**{"num_ranks": 4, "num_microbatches": 4} | arguments)
    assert message in str(error.value)


def test_a_hand_made_order_that_is_optimal_ends_the_search() -> None:
    """64 ranks and 256 micro-batches would otherwise take 15 seconds."""
    timeline = simulate(build_schedule("zbv", num_ranks=16, num_microbatches=64, costs=Costs()))
    assert timeline.span_bubble == 0


def test_a_slow_machine_finds_the_same_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """The budget counts work: a clock that runs a thousand times as fast changes nothing."""

    def once() -> Schedule:
        return search_schedule(4, 16, uneven(8), 3, placement="v", time_budget=0.3)

    at_leisure = once()
    seconds = itertools.count(step=1000)
    monkeypatch.setattr("time.monotonic", lambda: float(next(seconds)))
    assert once() == at_leisure


def test_a_budget_is_spent_once() -> None:
    budget = SearchBudget.of(100, time_budget=None)
    assert budget.num_tasks == NUM_TIMINGS * 100
    assert budget.spend(NUM_TIMINGS * 100)
    assert budget.is_exhausted
    assert not budget.spend(1)
    assert SearchBudget.of(100, time_budget=2.0).num_tasks == 2.0 * TASKS_PER_SECOND
    assert SearchBudget.of(10**9, time_budget=None).num_tasks == MOST_SECONDS * TASKS_PER_SECOND


def test_progress_is_shown_on_a_terminal_after_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    with SearchBudget(1000) as budget:
        budget.spend(100)
        assert not terminal.getvalue()
        clock[0] = 1.5
        budget.spend(100)
        assert budget.bar is not None
        progress = budget.bar[0]
        assert progress.tasks[0].completed == 200
        assert not progress.finished
    assert not progress.live.is_started
    assert "searching for a schedule" in terminal.getvalue()
