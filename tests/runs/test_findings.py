"""Findings of steps that were put together so that the right answer is known."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tests.runs.folders import line, timeline, write_run

import stageline as sl
from stageline.report.timeline import Timeline
from stageline.runs.findings.even_cut import even_cut
from stageline.runs.findings.finding import Finding
from stageline.runs.findings.findings import findings
from stageline.runs.findings.measured_step import MeasuredStep
from stageline.runs.read import read_run
from stageline.runs.records import PlannedCosts
from stageline.simulation.simulate import simulate

IDLE = {"data_seconds": [0.0], "optimizer_seconds": [0.0], "save_seconds": [0.0]}


def found(folder: Path, measured: Timeline, **fields: Any) -> dict[str, Finding]:
    """The findings of a run that did nothing but this step, by their titles."""
    lines = [line(100, step_seconds=measured.makespan / 1e3, **IDLE)]
    run = read_run(write_run(folder / "run", measured, lines, **fields))
    assert run.notes == ()
    return {finding.title: finding for finding in findings(run)}


def layers(balance: tuple[int, ...], costs: tuple[float, ...]) -> dict[str, Any]:
    count = len(costs)
    names = tuple(f"blocks.{number}" for number in range(count))
    return {
        "balance": balance,
        "layers": names,
        "layer_types": tuple(f"Type{number}" for number in range(count)),
        "layer_costs": costs,
    }


def times(*forward: float) -> dict[str, Any]:
    """Costs of stages whose gradients take as long as their forwards."""
    return dict.fromkeys(("forward", "input_grad", "weight_grad"), forward)


def with_balance(measured: Timeline, balance: tuple[int, ...]) -> Timeline:
    return replace(measured, balance=balance)


def test_bad_cut_is_found_with_the_gain_of_the_best_one(tmp_path: Path) -> None:
    measured = with_balance(timeline(2, 4, **times(1.0, 3.0)), (2, 6))
    finding = found(tmp_path, measured, **layers((2, 6), (1.0,) * 8))["uneven stages"]
    assert "use balance=[4, 4] instead of [2, 6]" in finding.advice
    assert "stage 1 takes 9 ms for a micro-batch, and the mean of all stages is 6 ms" in (
        finding.measured
    )
    even = timeline(2, 4, **times(2.0, 2.0))
    assert finding.gain == pytest.approx(100 * (1 - even.makespan / measured.makespan))


def test_cut_follows_the_costs_of_layers_and_not_their_number(tmp_path: Path) -> None:
    measured = with_balance(timeline(2, 4, **times(5.0, 3.0)), (2, 3))
    found_here = found(tmp_path, measured, **layers((2, 3), (1.0, 4.0, 1.0, 1.0, 1.0)))
    assert "uneven stages" not in found_here  # [1, 4] would be 1 and 7


def test_even_stages_are_not_found_uneven(tmp_path: Path) -> None:
    measured = with_balance(timeline(4, 8, **times(1.0, 1.0, 1.0, 1.0)), (2, 2, 2, 2))
    assert "uneven stages" not in found(tmp_path, measured, **layers((2,) * 4, (1.0,) * 8))


def test_more_microbatches_are_advised_with_the_gain_of_their_simulation(tmp_path: Path) -> None:
    measured = timeline(4, 4, **times(*[1.0] * 4))
    finding = found(tmp_path, measured)["few micro-batches"]
    more = timeline(4, 16, **times(*[0.25] * 4))
    assert "use num_microbatches=16" in finding.advice
    assert finding.gain == pytest.approx(100 * (1 - more.makespan / measured.makespan))
    assert "4 micro-batches on 4 ranks, which are idle for 42.9 %" in finding.measured


def test_no_more_microbatches_than_samples_are_advised(tmp_path: Path) -> None:
    measured = timeline(4, 32, **times(*[1.0] * 4))  # of 32 samples
    assert "few micro-batches" not in found(tmp_path, measured)


def test_faster_schedule_of_the_same_memory_is_found(tmp_path: Path) -> None:
    measured = timeline(4, 8, **times(*[1.0] * 4))
    finding = found(tmp_path, measured, **layers((1,) * 4, (1.0,) * 4))["another schedule"]
    assert 'use schedule="zb_h1"' in finding.advice
    other = timeline(4, 8, "zb_h1", **times(*[1.0] * 4))
    assert finding.gain == pytest.approx(100 * (1 - other.makespan / measured.makespan))


def test_schedule_that_holds_more_is_not_advised(tmp_path: Path) -> None:
    """zb_h2 would be faster than zb_h1, in twice the memory."""
    measured = timeline(4, 12, "zb_h1", **times(*[1.0] * 4))
    found_here = found(tmp_path, measured, **layers((1,) * 4, (1.0,) * 4))
    assert "zb_h2" not in str(found_here.get("another schedule"))


def test_schedule_with_more_stages_comes_with_a_cut_for_them(tmp_path: Path) -> None:
    measured = with_balance(timeline(4, 8, "gpipe", **times(*[1.0] * 4)), (2,) * 4)
    finding = found(tmp_path, measured, **layers((2,) * 4, (1.0,) * 8))["another schedule"]
    assert "balance=[1, 1, 1, 1, 1, 1, 1, 1]" in finding.advice


def test_slow_rank_is_told_from_a_bad_cut(tmp_path: Path) -> None:
    measured = with_balance(timeline(3, 6, **times(1.0, 2.0, 1.0)), (2, 2, 2))
    alike = layers((2, 2, 2), (1.0,) * 6) | {"layer_types": ("Block",) * 6}
    found_here = found(tmp_path, measured, **alike)
    assert "uneven stages" not in found_here
    finding = found_here["a slow rank"]
    assert "rank 1 takes up to 2 times as long as the same work" in finding.measured
    even = timeline(3, 6, **times(1.0, 1.0, 1.0))
    assert finding.gain == pytest.approx(100 * (1 - even.makespan / measured.makespan))


def test_slow_rank_is_told_by_what_the_plan_expects(tmp_path: Path) -> None:
    measured = with_balance(timeline(2, 4, **times(1.0, 3.0)), (1, 3))
    planned = {
        "plan": PlannedCosts(
            "1f1b",
            seconds=0.03,
            costs=dict.fromkeys(("forward", "input_grad", "weight_grad"), (0.001, 0.0015)),
            peak_memory=(1.0, 1.0),
        )
    }
    finding = found(tmp_path, measured, **layers((1, 3), (1.0,) * 4), **planned)["a slow rank"]
    assert "rank 1 takes up to 2 times" in finding.measured


def test_stages_of_different_layers_say_nothing_about_ranks(tmp_path: Path) -> None:
    measured = with_balance(timeline(2, 4, **times(1.0, 2.0)), (1, 1))
    assert "a slow rank" not in found(tmp_path, measured, **layers((1, 1), (1.0, 1.0)))


def test_slow_messages_are_found_with_the_gain_of_free_ones(tmp_path: Path) -> None:
    measured = timeline(4, 4, **times(*[1.0] * 4), transfer=0.5)
    finding = found(tmp_path, measured)["messages between stages"]
    assert "a message takes 0.5 ms, and a stage 3 ms" in finding.measured
    free = timeline(4, 4, **times(*[1.0] * 4))
    assert finding.gain == pytest.approx(100 * (1 - free.makespan / measured.makespan))


def test_actions_that_take_longer_at_times_are_found(tmp_path: Path) -> None:
    usual = timeline(2, 8, **times(1.0, 1.0))
    late = [
        tuple(
            span._replace(
                start=span.start + 30 * (span.start >= 9), end=span.end + 30 * (span.end > 9)
            )
            for span in row
        )
        for row in usual.spans
    ]  # whatever ran at 9 ms took 30 ms more
    measured = replace(usual, spans=tuple(late), idle=())
    finding = found(tmp_path, measured)["varying times"]
    assert f"a recorded step takes {measured.makespan:g} ms, and 27 ms if each" in finding.measured
    assert finding.gain == pytest.approx(100 * (1 - 27 / measured.makespan))


def test_waiting_for_the_loader_and_for_checkpoints_is_found(tmp_path: Path) -> None:
    parts = {"data_seconds": [0.02, 0.03], "save_seconds": [0.01, 0.0]}
    lines = [line(100, step_seconds=0.1, **parts)]
    run = read_run(write_run(tmp_path / "run", timeline(2, 32), lines))
    by_title = {finding.title: finding for finding in findings(run)}
    assert by_title["waiting for data"].gain == pytest.approx(30)
    assert by_title["waiting for checkpoints"].gain == pytest.approx(10)


def test_gain_counts_what_is_between_steps(tmp_path: Path) -> None:
    """A cut that halves the pipeline's time saves less of a step that also waits for data."""
    measured = with_balance(timeline(2, 4, **times(1.0, 3.0)), (2, 6))
    lines = [line(100, data_seconds=[measured.makespan / 1e3], step_seconds=1.0)]
    made = layers((2, 6), (1.0,) * 8)
    run = read_run(write_run(tmp_path / "run", measured, lines, **made))
    alone = found(tmp_path / "alone", measured, **made)["uneven stages"].gain
    by_title = {finding.title: finding for finding in findings(run)}
    assert by_title["uneven stages"].gain == pytest.approx((alone or 0) / 2, rel=0.05)


def test_simulation_of_what_was_measured_is_what_was_measured(tmp_path: Path) -> None:
    costs = times(1.0, 1.4, 0.7, 1.1) | {"transfer": (0.3, 0.1, 0.2, 0.0)}
    measured = timeline(4, 8, **costs)
    run = read_run(write_run(tmp_path / "run", measured))
    step = MeasuredStep.of(run)
    assert step is not None
    assert step.simulated == pytest.approx(measured.makespan, rel=0.02)


def test_recomputation_is_a_time_of_its_own(tmp_path: Path) -> None:
    forward, backward = sl.Schedule.from_text("0F0 0B0").actions[0]
    span = sl.simulate(sl.Schedule.from_text("0F0 0B0")).spans[0][0]
    row = (
        span._replace(action=forward, start=0, end=2),
        span._replace(action=backward, start=2, end=4),
        span._replace(action=backward, start=4, end=10),
    )
    run = read_run(write_run(tmp_path / "run", Timeline((row,), (0,), name="1f1b")))
    step = MeasuredStep.of(run)
    assert step is not None
    assert step.stages == ((2, 3, 3, 2),)


def test_ranks_that_run_one_after_another_are_said_to(tmp_path: Path) -> None:
    (finding,) = found(tmp_path, timeline(2, 4), backend="serial").values()
    assert finding.title == "ranks run one after another"


def test_advice_for_many_stages_stays_short(tmp_path: Path) -> None:
    uneven = (4.0,) * 10 + (1.0,) * 30
    measured = with_balance(timeline(40, 32, **times(*uneven)), (2,) * 40)
    found_here = found(tmp_path, measured, **layers((2,) * 40, (1.0,) * 80))
    assert "use stages of equal times instead of [2, 2" in found_here["uneven stages"].advice
    assert all(len(str(finding)) < 500 for finding in found_here.values())


def test_run_without_a_recorded_step_has_no_findings(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "timeline.json").unlink()
    assert findings(read_run(folder)) == []


def test_even_cut_is_a_best_cut() -> None:
    draw = Random(5)
    for _ in range(300):
        costs = [draw.choice([0.0, 1e-6, 1.0, 2.5, 7.0]) for _ in range(draw.randint(1, 9))]
        num_stages = draw.randint(1, len(costs))
        balance = even_cut(costs, num_stages)
        assert sum(balance) == len(costs)
        assert min(balance) >= 1
        longest = min(
            longest_stage(costs, (0, *inner, len(costs)))
            for inner in combinations(range(1, len(costs)), num_stages - 1)
        )
        cuts = (0, *(sum(balance[: stage + 1]) for stage in range(num_stages)))
        assert longest_stage(costs, cuts) == pytest.approx(longest, rel=1e-6, abs=1e-9)


def longest_stage(costs: list[float], cuts: tuple[int, ...]) -> float:
    return max(sum(costs[start:stop]) for start, stop in pairwise(cuts))


def test_findings_of_a_large_pipeline_take_less_than_two_seconds(tmp_path: Path) -> None:
    schedule = sl.build_schedule("1f1b", num_ranks=32, num_microbatches=64)
    measured = replace(simulate(schedule), costs=None, balance=(30,) * 32)
    run = read_run(write_run(tmp_path / "run", measured, **layers((30,) * 32, (1.0,) * 960)))
    assert findings(run)
