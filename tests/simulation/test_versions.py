"""The number of weight versions on each rank, with parameters of size 1 per stage."""

from typing import Any

import pytest

from stageline.costs import Costs
from stageline.report.memory import peak_memory
from stageline.report.spans import MemoryLevel
from stageline.schedules.build import build_schedule, schedule_names
from stageline.schedules.schedule import Schedule
from stageline.simulation.simulate import simulate

WEIGHTS = Costs(activation=0, parameters=1)


def most_versions(name: str, p: int, m: int, **options: Any) -> tuple[float, ...]:
    schedule = build_schedule(name, num_ranks=p, num_microbatches=m, **options)
    return simulate(schedule, WEIGHTS).peak_memory


@pytest.mark.parametrize("p", range(1, 6))
def test_pipedream_holds_a_version_for_each_warm_up_forward_and_one_more(p: int) -> None:
    assert most_versions("pipedream", p, 1) == tuple(range(p, 0, -1))


@pytest.mark.parametrize("p", range(1, 6))
def test_with_vertical_sync_every_stage_holds_as_many_as_the_first(p: int) -> None:
    assert most_versions("pipedream", p, 1, vertical_sync=True) == (p,) * p


@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 2), (3, 3), (4, 4), (4, 7), (5, 8)])
def test_2bw_holds_two_versions(p: int, m: int) -> None:
    assert most_versions("pipedream_2bw", p, m) == (2,) * p


def test_several_micro_batches_a_mini_batch_make_fewer_versions() -> None:
    """Three micro-batches are in flight behind one: with m = 2 or 3 that is two steps."""
    assert [most_versions("pipedream", 4, m) for m in (1, 2, 3, 4)] == [
        (4, 3, 2, 1), (3, 2, 2, 1), (2, 2, 2, 1), (2, 2, 2, 1),
    ]  # fmt: skip


@pytest.mark.parametrize("name", schedule_names(synchronous=True))
def test_a_synchronous_stream_holds_one_version(name: str) -> None:
    schedule = build_schedule(name, num_ranks=3, num_microbatches=6, num_minibatches=3)
    chunks = schedule.num_stages // 3
    assert simulate(schedule, WEIGHTS).peak_memory == (chunks,) * 3


@pytest.mark.parametrize("name", schedule_names(synchronous=True))
def test_a_single_step_holds_what_it_held(name: str) -> None:
    once, stream = (
        build_schedule(name, num_ranks=3, num_microbatches=6, num_minibatches=count)
        for count in (None, 1)
    )
    costs = Costs(activation=4, retained=1, working_set=2, parameters=7, gradients=7)
    assert simulate(once, costs).memory == simulate(stream, costs).memory


def test_versions_of_the_first_of_two_ranks_level_by_level() -> None:
    schedule = build_schedule("pipedream", num_ranks=2, num_microbatches=1, num_minibatches=3)
    timeline = simulate(schedule, Costs(activation=0, parameters=10))
    assert timeline.memory[0] == (
        MemoryLevel(0, 0, 10),
        MemoryLevel(6, 0, 20),  # 0STEP@1, while 0B1@0 is still to come
        MemoryLevel(9, 0, 10),  # 0B1@0 ends
        MemoryLevel(9, 0, 20),  # 0STEP@2, while 0B2@1 is still to come
        MemoryLevel(12, 0, 10),
    )
    assert timeline.memory[1] == (MemoryLevel(0, 0, 10),)


def test_a_version_that_waits_for_its_first_use_is_held() -> None:
    """With 2BW the second mini-batch uses the first weights, though the first step is done."""
    schedule = Schedule.from_text("0F0@0 0B0@0 0STEP@1 0F1@0 0B1@0 0STEP@2 0F2@1 0B2@1 0STEP@3")
    totals = [level.total for level in simulate(schedule, WEIGHTS).memory[0]]
    assert totals == [1, 2, 1, 2, 1]


def test_each_stage_has_its_own_versions() -> None:
    costs = Costs(activation=0, parameters=[1, 10, 100])
    schedule = build_schedule("pipedream", num_ranks=3, num_microbatches=1)
    assert simulate(schedule, costs).peak_memory == (3, 20, 100)


def test_every_replica_holds_its_stage_and_its_versions() -> None:
    schedule = build_schedule("pipedream", num_ranks=4, num_microbatches=3, replicas=[3, 1])
    costs = Costs(activation=0, parameters=[10, 1], gradients=[5, 2], optimizer_state=100)
    timeline = simulate(schedule, costs)
    first, last = ([row[i].total for row in timeline.memory] for i in (0, -1))
    assert first == last == [115, 115, 115, 103]
    assert list(timeline.peak_memory) == [125, 125, 125, 103]


@pytest.mark.parametrize("replicas", [None, [2, 1, 1], [1, 1, 2]])
def test_the_peak_of_an_order_is_that_of_its_timeline(replicas: list[int] | None) -> None:
    schedule = build_schedule("pipedream", num_ranks=4, num_microbatches=4, replicas=replicas)
    costs = Costs(activation=3, working_set=2, parameters=5, optimizer_state=1)
    peaks = peak_memory(schedule.actions, schedule.placement, costs, schedule.replicas)
    assert peaks == simulate(schedule, costs).peak_memory
