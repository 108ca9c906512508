"""The memory of each rank over time, on schedules small enough to compute it by hand."""

import pytest

from stageline.costs import Costs
from stageline.report.spans import MemoryLevel
from stageline.schedules.build import build_schedule, schedule_names
from stageline.schedules.schedule import Schedule
from stageline.simulation.simulate import simulate

V = Schedule.from_text("0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0")


def test_an_activation_is_held_from_f_to_i_and_its_retained_part_to_w() -> None:
    schedule = Schedule.from_text("0F0 0F1 0I0 0I1 0W0 0W1")
    timeline = simulate(schedule, Costs(activation=5, retained=2))
    assert timeline.memory == (
        (
            MemoryLevel(0, 0, 0),
            MemoryLevel(0, 5, 5),  # 0F0 starts
            MemoryLevel(1, 10, 10),  # 0F1 starts
            MemoryLevel(3, 7, 7),  # 0I0 ends
            MemoryLevel(4, 4, 4),
            MemoryLevel(5, 2, 2),  # 0W0 ends
            MemoryLevel(6, 0, 0),
        ),
    )
    assert timeline.peak_activations == timeline.peak_memory == (10,)


def test_a_whole_backward_frees_everything_at_its_end() -> None:
    timeline = simulate(Schedule.from_text("0F0 0B0"), Costs(activation=5, retained=2))
    assert timeline.memory == ((MemoryLevel(0, 0, 0), MemoryLevel(0, 5, 5), MemoryLevel(3, 0, 0)),)


def test_all_of_an_activation_is_retained_unless_said_otherwise() -> None:
    schedule = Schedule.from_text("0F0 0I0 0F1 0I1 0W0 0W1")
    assert simulate(schedule).peak_activations == (2,)
    assert simulate(schedule, Costs(retained=0)).peak_activations == (1,)
    assert simulate(schedule, Costs(retained=0.25)).peak_activations == (1.25,)


def test_each_stage_holds_its_own_activations() -> None:
    timeline = simulate(V, Costs(activation=[1, 10, 100, 1000]))
    assert timeline.peak_activations == (1001, 110)


def test_the_first_rank_of_1f1b_holds_as_many_activations_as_there_are_ranks() -> None:
    timeline = simulate(build_schedule("1f1b", num_ranks=4, num_microbatches=8))
    assert timeline.peak_activations == (4, 3, 2, 1)


def test_a_working_set_is_held_while_i_or_b_runs_and_is_no_activation() -> None:
    costs = Costs(recompute=1, activation=1, working_set=8)
    split = simulate(Schedule.from_text("0F0 0F1 0I0 0W0 0I1 0W1"), costs)
    assert split.memory == (
        (
            MemoryLevel(0, 0, 0),
            MemoryLevel(0, 1, 1),
            MemoryLevel(1, 2, 2),
            MemoryLevel(2, 2, 10),  # 0I0 runs its forward again
            MemoryLevel(4, 2, 2),
            MemoryLevel(5, 1, 1),
            MemoryLevel(5, 1, 9),
            MemoryLevel(7, 1, 1),
            MemoryLevel(8, 0, 0),
        ),
    )
    assert (split.peak_activations, split.peak_memory) == ((2,), (10,))
    whole = simulate(Schedule.from_text("0F0 0B0"), costs)
    assert (whole.peak_activations, whole.peak_memory) == ((1,), (9,))


def test_parameters_gradients_and_optimizer_state_of_all_stages_of_a_rank_count() -> None:
    costs = Costs(parameters=[1, 2, 3, 4], gradients=10, optimizer_state=[100, 200, 300, 400])
    timeline = simulate(V, costs)
    assert [row[0].total for row in timeline.memory] == [525, 525]
    assert timeline.peak_activations == (2.0, 2.0)
    assert timeline.peak_memory == (527.0, 527.0)
    assert [row[-1] for row in timeline.memory] == [
        MemoryLevel(12, 0, 525),
        MemoryLevel(10, 0, 525),
    ]


@pytest.mark.parametrize("name", schedule_names())
def test_every_activation_is_freed_in_the_end(name: str) -> None:
    schedule = build_schedule(name, num_ranks=3, num_microbatches=6)
    costs = Costs(activation=4, retained=1, working_set=2, parameters=7)
    for rank, row in enumerate(simulate(schedule, costs).memory):
        assert row[-1].activations == 0
        assert row[-1].total == 7 * len(schedule.stages_of(rank))
        assert min(level.activations for level in row) == 0
