"""PipeDream and PipeDream-2BW: orders written out, and the weights that each micro-batch uses.

The papers count micro-batches and stages from 1; here they count from 0.
"""

import re
from collections.abc import Iterator
from importlib import import_module
from textwrap import dedent
from typing import Any

import pytest

from stageline.costs import Costs
from stageline.errors import ScheduleError
from stageline.report.spans import Span
from stageline.schedules.action import COMPUTE, Kind
from stageline.schedules.build import build_schedule
from stageline.schedules.schedule import Schedule
from stageline.simulation.simulate import simulate

SUPERSCRIPT = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
SIZES = [(p, m) for p in range(1, 6) for m in range(1, 9)]


def rows(name: str, num_ranks: int, num_microbatches: int, **options: Any) -> str:
    return str(
        build_schedule(name, num_ranks=num_ranks, num_microbatches=num_microbatches, **options)
    )


def literal(text: str) -> str:
    """Parse a schedule; a line that is indented further continues its rank's row."""
    return dedent(text).strip("\n").replace("\n    ", " ")


def versions(schedule: Schedule) -> Iterator[tuple[int, int, int]]:
    """Return stage, micro-batch and version of all compute actions."""
    for row in schedule.actions:
        yield from ((a.stage, a.microbatch, a.version) for a in row if a.kind in COMPUTE)


# Orders


def test_pipedream_steps_after_every_backward_and_runs_ahead_by_the_stages_behind() -> None:
    assert rows("pipedream", 3, 1, num_minibatches=5) == literal("""
        0F0@0 0F1@0 0F2@0 0B0@0 0STEP@1 0F3@1 0B1@0 0STEP@2 0F4@2 0B2@0 0STEP@3
            0B3@1 0STEP@4 0B4@2 0STEP@5
        1F0@0 1F1@0 1B0@0 1STEP@1 1F2@1 1B1@0 1STEP@2 1F3@2 1B2@1 1STEP@3 1F4@3
            1B3@2 1STEP@4 1B4@3 1STEP@5
        2F0@0 2B0@0 2STEP@1 2F1@1 2B1@1 2STEP@2 2F2@2 2B2@2 2STEP@3 2F3@3 2B3@3
            2STEP@4 2F4@4 2B4@4 2STEP@5
    """)


def test_with_vertical_sync_a_micro_batch_meets_one_version_on_all_stages() -> None:
    assert rows("pipedream", 3, 1, num_minibatches=5, vertical_sync=True) == literal("""
        0F0@0 0F1@0 0F2@0 0B0@0 0STEP@1 0F3@1 0B1@0 0STEP@2 0F4@2 0B2@0 0STEP@3
            0B3@1 0STEP@4 0B4@2 0STEP@5
        1F0@0 1F1@0 1B0@0 1STEP@1 1F2@0 1B1@0 1STEP@2 1F3@1 1B2@0 1STEP@3 1F4@2
            1B3@1 1STEP@4 1B4@2 1STEP@5
        2F0@0 2B0@0 2STEP@1 2F1@0 2B1@0 2STEP@2 2F2@0 2B2@0 2STEP@3 2F3@1 2B3@1
            2STEP@4 2F4@2 2B4@2 2STEP@5
    """)


def test_with_two_micro_batches_a_mini_batch_pipedream_steps_after_every_second_backward() -> None:
    assert rows("pipedream", 3, 2, num_minibatches=3) == literal("""
        0F0@0 0F1@0 0F2@0 0B0@0 0F3@0 0B1@0 0STEP@1 0F4@1 0B2@0 0F5@1 0B3@0 0STEP@2
            0B4@1 0B5@1 0STEP@3
        1F0@0 1F1@0 1B0@0 1F2@0 1B1@0 1STEP@1 1F3@1 1B2@0 1F4@1 1B3@1 1STEP@2 1F5@2
            1B4@1 1B5@2 1STEP@3
        2F0@0 2B0@0 2F1@0 2B1@0 2STEP@1 2F2@1 2B2@1 2F3@1 2B3@1 2STEP@2 2F4@2 2B4@2
            2F5@2 2B5@2 2STEP@3
    """)


def test_2bw_uses_the_weights_of_one_step_earlier_on_all_stages() -> None:
    assert rows("pipedream_2bw", 2, 2, num_minibatches=4) == literal("""
        0F0@0 0F1@0 0B0@0 0F2@0 0B1@0 0STEP@1 0F3@0 0B2@0 0F4@1 0B3@0 0STEP@2 0F5@1
            0B4@1 0F6@2 0B5@1 0STEP@3 0F7@2 0B6@2 0B7@2 0STEP@4
        1F0@0 1B0@0 1F1@0 1B1@0 1STEP@1 1F2@0 1B2@0 1F3@0 1B3@0 1STEP@2 1F4@1 1B4@1
            1F5@1 1B5@1 1STEP@3 1F6@2 1B6@2 1F7@2 1B7@2 1STEP@4
    """)


def test_two_replicas_of_the_input_stage_take_turns_and_step_together() -> None:
    assert rows("pipedream", 3, 2, num_minibatches=3, replicas=[2, 1]) == literal("""
        0F0@0 0F2@0 0B0@0 0STEP@1 0F4@1 0B2@0 0STEP@2 0B4@1 0STEP@3
        0F1@0 0F3@0 0B1@0 0STEP@1 0F5@1 0B3@0 0STEP@2 0B5@1 0STEP@3
        1F0@0 1B0@0 1F1@0 1B1@0 1STEP@1 1F2@1 1B2@1 1F3@1 1B3@1 1STEP@2
            1F4@2 1B4@2 1F5@2 1B5@2 1STEP@3
    """)


def test_three_replicas_of_the_input_stage_as_the_paper_has_them_for_vgg_16() -> None:
    assert rows("pipedream", 4, 3, num_minibatches=3, replicas=[3, 1]) == literal("""
        0F0@0 0F3@0 0B0@0 0STEP@1 0F6@1 0B3@0 0STEP@2 0B6@1 0STEP@3
        0F1@0 0F4@0 0B1@0 0STEP@1 0F7@1 0B4@0 0STEP@2 0B7@1 0STEP@3
        0F2@0 0F5@0 0B2@0 0STEP@1 0F8@1 0B5@0 0STEP@2 0B8@1 0STEP@3
        1F0@0 1B0@0 1F1@0 1B1@0 1F2@0 1B2@0 1STEP@1 1F3@1 1B3@1 1F4@1 1B4@1 1F5@1 1B5@1
            1STEP@2 1F6@2 1B6@2 1F7@2 1B7@2 1F8@2 1B8@2 1STEP@3
    """)


@pytest.mark.parametrize("family", ["pipedream", "pipedream_2bw"])
def test_the_diagram_in_the_docstring_is_what_runs(family: str) -> None:
    text = import_module(f"stageline.schedules.families.{family}").__doc__ or ""
    drawn = re.findall(r"rank \d │ ((?:(?:[FB]\S+|\.\.\.) )+)", text)
    p, m = (2, 2) if family == "pipedream_2bw" else (3, 1)
    schedule = build_schedule(family, num_ranks=p, num_microbatches=m)
    timeline = simulate(schedule, Costs(input_grad=0.5, weight_grad=0.5))
    for cells, row in zip(drawn, timeline.spans, strict=True):
        names = slots(row)
        assert cells.split() == names[: len(cells.split())]


def slots(row: tuple[Span, ...]) -> list[str]:
    """Return a cell for each unit of time, with the version as a small number."""
    names: list[str] = []
    for action, start, end in row:
        if action.kind is not Kind.STEP:
            small = str(action.version).translate(SUPERSCRIPT)
            idle = ["..."] * (int(start) - len(names))
            names += [*idle, *[f"{action.kind}{action.microbatch}{small}"] * int(end - start)]
    return names


# Versions


@pytest.mark.parametrize("p", range(1, 6))
def test_stage_s_of_n_uses_the_weights_of_n_minus_s_steps_ago(p: int) -> None:
    """Micro-batch t of the paper, from 1, uses w(t-n+s), and w(0) are the first weights."""
    schedule = build_schedule("pipedream", num_ranks=p, num_microbatches=1)
    for stage, microbatch, version in versions(schedule):
        t, s = microbatch + 1, stage + 1
        assert version == max(0, t - p + s - 1)


@pytest.mark.parametrize("p", range(1, 6))
def test_with_vertical_sync_every_stage_uses_what_the_first_one_used(p: int) -> None:
    schedule = build_schedule("pipedream", num_ranks=p, num_microbatches=1, vertical_sync=True)
    for _, microbatch, version in versions(schedule):
        assert version == max(0, (microbatch + 1) - p + 1 - 1)


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_with_m_micro_batches_a_stage_uses_the_latest_weights_that_it_has(p: int, m: int) -> None:
    """The paper's delay applies to mini-batches, rounded up: (t - n + s) / m."""
    for row in build_schedule("pipedream", num_ranks=p, num_microbatches=m).actions:
        made = 0
        for action in row:
            if action.kind is Kind.STEP:
                made = action.version
            elif action.kind is Kind.F:
                assert (
                    action.version
                    == made
                    == max(0, (action.microbatch - p + 1 + action.stage) // m)
                )


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_vertical_sync_with_m_micro_batches(p: int, m: int) -> None:
    schedule = build_schedule("pipedream", num_ranks=p, num_microbatches=m, vertical_sync=True)
    for _, microbatch, version in versions(schedule):
        assert version == max(0, (microbatch - p + 1) // m)


@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in SIZES if m >= p])
def test_2bw_versions_as_in_the_paper(p: int, m: int) -> None:
    schedule = build_schedule("pipedream_2bw", num_ranks=p, num_microbatches=m)
    for _, microbatch, version in versions(schedule):
        k = microbatch + 1
        assert version == max((k - 1) // m - 1, 0)


# Replicas


@pytest.mark.parametrize("replicas", [[1, 1], [2, 1], [3, 1], [1, 2], [2, 2], [4, 1, 1], [2, 1, 3]])
def test_the_input_stage_runs_ahead_by_noam_less_one(replicas: list[int]) -> None:
    """NOAM = ceil(ranks / replicas of the input stage) are then in flight."""
    schedule = build_schedule(
        "pipedream", num_ranks=sum(replicas), num_microbatches=12, replicas=replicas
    )
    noam = -(-sum(replicas) // replicas[0])
    for row in schedule.actions[: replicas[0]]:
        computed = [action.kind for action in row if action.kind in COMPUTE]
        assert computed[: noam + 2] == [Kind.F] * noam + [Kind.B, Kind.F]


@pytest.mark.parametrize("name", ["pipedream", "pipedream_2bw"])
def test_a_micro_batch_returns_to_the_replica_that_ran_it_forward(name: str) -> None:
    schedule = build_schedule(name, num_ranks=6, num_microbatches=6, replicas=[3, 1, 2])
    assert (schedule.placement, schedule.replicas) == ((0, 3, 4), (3, 1, 2))
    for rank, row in enumerate(schedule.actions):
        for action in row:
            if action.kind in COMPUTE:
                first, count = ((0, 3), (3, 1), (4, 2))[action.stage]
                assert rank == first + action.microbatch % count


def test_one_rank_for_each_stage_is_the_same_as_no_replicas() -> None:
    plain, ones = (
        build_schedule("pipedream", num_ranks=3, num_microbatches=2, replicas=replicas)
        for replicas in (None, [1, 1, 1])
    )
    assert plain == ones


# What does not fit


def refused(message: str) -> Any:
    return pytest.raises(ScheduleError, match=f"^{re.escape(message)}$")


def test_2bw_needs_as_many_micro_batches_as_ranks() -> None:
    message = (
        "num_microbatches is 3, but 'pipedream_2bw' on 4 ranks needs at least 4 so that two weight "
        "versions suffice: use more, or 'pipedream'"
    )
    with refused(message):
        build_schedule("pipedream_2bw", num_ranks=4, num_microbatches=3)


@pytest.mark.parametrize("replicas", [[2, 1], [4, 0], [5, -1], [True, 3], [2.0, 2], [], 4])
def test_replicas_that_do_not_sum_to_the_ranks_are_refused(replicas: Any) -> None:
    message = (
        f"replicas is {replicas!r}, but must be one positive integer for each stage, with sum 4, "
        "the number of ranks"
    )
    with refused(message):
        build_schedule("pipedream", num_ranks=4, num_microbatches=4, replicas=replicas)


def test_replicas_need_a_share_of_every_mini_batch() -> None:
    message = (
        "num_microbatches is 4, but a stage on 3 ranks needs a multiple of 3: use one, or other "
        "replicas"
    )
    with refused(message):
        build_schedule("pipedream", num_ranks=4, num_microbatches=4, replicas=[3, 1])


@pytest.mark.parametrize("count", [0, -1, 1.5, True])
def test_an_invalid_number_of_mini_batches_is_rejected(count: Any) -> None:
    with refused(f"num_minibatches is {count!r}, but has to be a whole number from 1 up"):
        build_schedule("pipedream", num_ranks=2, num_microbatches=2, num_minibatches=count)


def test_options_of_other_families_are_refused() -> None:
    message = "vertical_sync was given for 'pipedream_2bw', which takes replicas: omit it, or use "
    with refused(f"{message}pipedream"):
        build_schedule("pipedream_2bw", num_ranks=2, num_microbatches=2, vertical_sync=True)
    message = "replicas was given for '1f1b', which takes none: omit it, or use "
    with refused(f"{message}pipedream or pipedream_2bw"):
        build_schedule("1f1b", num_ranks=4, num_microbatches=4, replicas=[2, 2])
