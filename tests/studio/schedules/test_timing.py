"""The times and memory that the page draws are those of the simulator and of `Timeline`."""

from __future__ import annotations

import random

import numpy as np
import pytest

from stageline import Costs, Schedule, Timeline, schedule_names, simulate
from stageline.costs import Link
from stageline.errors import ScheduleError
from stageline.schedules.check import check
from stageline.studio.schedules.arrays import NOTHING, ActionArrays
from stageline.studio.schedules.fields import SEARCHED_FAMILIES, ScheduleFields, stage_costs
from stageline.studio.schedules.orders import OrderStore
from stageline.studio.schedules.timing import TimedActions, held_memory, timed


def random_costs(chance: random.Random, num_stages: int) -> Costs:
    def some(most: float = 2.0) -> float | list[float]:
        many = [chance.uniform(0.0, most) for _ in range(num_stages)]
        return many if chance.random() < 0.5 else many[0]

    return Costs(
        forward=some(),
        input_grad=some(),
        weight_grad=some(),
        transfer=some(),
        recompute=some(),
        activation=2.0,
        retained=some(),
        working_set=some(),
        parameters=some(),
        optimizer_state=some(),
        message=some() if chance.random() < 0.2 else 0.0,
        step=some() if chance.random() < 0.2 else 0.0,
        links=Link(latency=chance.random(), bandwidth=2.0),
    )


def assert_same(work: TimedActions, timeline: Timeline) -> None:
    spans = [span for row in timeline.spans for span in row]
    assert work.starts.tolist() == [span.start for span in spans]
    assert work.ends.tolist() == [span.end for span in spans]
    assert not work.never_run.any()
    memory = held_memory(work)
    assert memory.peak_activations == list(timeline.peak_activations)
    assert memory.peaks == list(timeline.peak_memory)
    for row, levels in zip(work.actions.rows, timeline.memory, strict=True):
        drawn = {
            *zip(work.starts[row].tolist(), memory.during[row].tolist(), strict=True),
            *zip(work.ends[row].tolist(), memory.after[row].tolist(), strict=True),
        }
        assert {(level.time, level.total) for level in levels[1:]} <= drawn


@pytest.mark.parametrize("name", [n for n in schedule_names() if n not in SEARCHED_FAMILIES])
def test_every_family_is_timed_as_the_simulator_does(name: str) -> None:
    chance = random.Random(name)
    orders = OrderStore()
    for _ in range(4):
        fields = ScheduleFields(
            family=name,
            num_ranks=chance.randint(1, 5),
            num_microbatches=chance.randint(1, 12),
            num_minibatches=chance.choice([1, 3]),
        )
        try:
            order = orders.get(fields)
        except ScheduleError:
            continue  # not for these sizes
        costs = random_costs(chance, order.schedule.num_stages)
        assert_same(timed(order, costs), simulate(order.schedule, costs))


def test_what_an_action_waits_for_has_ended_when_it_starts() -> None:
    order = OrderStore().get(ScheduleFields(family="dualpipe_v", num_microbatches=10))
    work = timed(order, Costs(forward=0.7, transfer=0.3))
    waits = order.waits_for != NOTHING
    assert waits.sum() == order.num_actions - 10  # all but the first stage's forwards
    assert (work.ends[order.waits_for[waits]] <= work.starts[waits]).all()


def test_an_order_with_a_deadlock_is_timed_up_to_it() -> None:
    schedule = Schedule.from_text("0F0 0B0 0F1 0B1", "1F1 1F0 1B1 1B0")
    with pytest.raises(ScheduleError, match="wait for each other") as caught:
        check(schedule)
    work = timed(ActionArrays(schedule, str(caught.value)), Costs())
    assert work.never_run.tolist() == [False, True, True, True, True, True, True, True]
    assert work.starts.tolist() == [0, 1, 3, 4, 0, 1, 2, 4]  # B takes 2


def test_moved_actions_are_checked() -> None:
    orders = OrderStore()
    legal = orders.get(ScheduleFields(family="1f1b", num_ranks=2, moves=((0, 3, 2),)))
    assert (legal.verdict, legal.schedule.name) == ("", "1f1b edited")
    assert str(legal.schedule).split()[:4] == ["0F0", "0F1", "0F2", "0B0"]
    fields = ScheduleFields(family="1f1b", num_ranks=2, moves=((0, 0, 4),))
    assert orders.get(fields).verdict.startswith("0B0 comes before 0F0, which it needs: swap them")
    with pytest.raises(ScheduleError, match="position 99 of rank 0 does not exist"):
        orders.get(ScheduleFields(family="1f1b", moves=((0, 0, 99),)))


def test_costs_of_a_part_of_the_model_are_divided_over_its_stages() -> None:
    costs = stage_costs({"forward": [1.0, 2.0], "transfer": 0.1}, num_ranks=2, chunks=2)
    assert costs.per_stage("forward", 4) == (0.5, 0.5, 1.0, 1.0)
    assert costs.per_stage("input_grad", 4) == (0.5,) * 4
    assert costs.per_stage("transfer", 4) == (0.1,) * 4
    per_stage = stage_costs({"forward": [1.0, 2.0, 3.0, 4.0]}, num_ranks=2, chunks=2)
    assert per_stage.per_stage("forward", 4) == (1.0, 2.0, 3.0, 4.0)


def test_a_kept_order_is_not_built_again_and_the_oldest_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("stageline.studio.schedules.orders.MOST_KEPT", 150)
    orders = OrderStore()
    first, second = (ScheduleFields(family=name) for name in ("1f1b", "gpipe"))  # 64 actions each
    kept = orders.get(first)
    orders.get(second)
    assert orders.get(first) is kept
    third = orders.get(ScheduleFields(family="zb_h1", num_microbatches=4))  # 48 actions
    assert third.num_actions == 48
    assert orders.get(first) is kept
    assert len(orders._orders) == 2
    assert np.array_equal(orders.get(second).kinds, kept.kinds) is False
