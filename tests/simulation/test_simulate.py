"""Small schedules timed by hand: actions, messages, and errors."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stageline.costs import Costs, Link
from stageline.errors import CostsError, ScheduleError
from stageline.report.timeline import Timeline
from stageline.schedules.build import build_schedule, schedule_names
from stageline.schedules.edges import chain
from stageline.schedules.program.lower import lower
from stageline.schedules.program.program import Program
from stageline.schedules.schedule import Schedule
from stageline.simulation.simulate import simulate

PAIR = Schedule.from_text("0F0 0B0", "1F0 1B0")
TWO_EACH = Schedule.from_text("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1")
SPLIT = Schedule.from_text("0F0 0I0 0W0", "1F0 1I0 1W0")
V = Schedule.from_text("0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0")


def times(timeline: Timeline) -> list[dict[str, tuple[float, float]]]:
    """Return the start and end of each action, by rank."""
    return [{str(span.action): (span.start, span.end) for span in row} for row in timeline.spans]


def ways(timeline: Timeline) -> dict[str, tuple[float, float]]:
    """Return the start and arrival of each message."""
    return {str(transfer.send): (transfer.start, transfer.end) for transfer in timeline.transfers}


# When


def test_one_forward_one_backward_timed_by_hand() -> None:
    timeline = simulate(Schedule.from_text("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"))
    assert times(timeline) == [
        {"0F0": (0, 1), "0F1": (1, 2), "0B0": (4, 6), "0B1": (7, 9)},
        {"1F0": (1, 2), "1B0": (2, 4), "1F1": (4, 5), "1B1": (5, 7)},
    ]


def test_i_goes_on_to_the_rank_before_and_w_waits_for_nothing_but_its_i() -> None:
    assert times(simulate(SPLIT)) == [
        {"0F0": (0, 1), "0I0": (3, 4), "0W0": (4, 5)},
        {"1F0": (1, 2), "1I0": (2, 3), "1W0": (3, 4)},
    ]


def test_each_stage_has_its_own_times() -> None:
    costs = Costs(forward=[1, 2], input_grad=[3, 4], weight_grad=[5, 6])
    assert times(simulate(SPLIT, costs)) == [
        {"0F0": (0, 1), "0I0": (7, 10), "0W0": (10, 15)},
        {"1F0": (1, 3), "1I0": (3, 7), "1W0": (7, 13)},
    ]
    assert times(simulate(PAIR, costs)) == [
        {"0F0": (0, 1), "0B0": (13, 21)},
        {"1F0": (1, 3), "1B0": (3, 13)},
    ]


def test_recomputation_is_part_of_i_or_b() -> None:
    costs = Costs(recompute=[0, 7])
    assert times(simulate(SPLIT, costs))[1] == {"1F0": (1, 2), "1I0": (2, 10), "1W0": (10, 11)}
    assert times(simulate(PAIR, costs))[1] == {"1F0": (1, 2), "1B0": (2, 11)}


@pytest.mark.parametrize("work", [PAIR, lower(PAIR)], ids=["schedule", "program"])
@pytest.mark.parametrize(
    ("recompute", "backward"),
    [
        (1, (3, 6)),  # the gradient arrives at 4, when the recomputation has just ended
        (3, (1, 6)),
        (5, (1, 8)),  # it began right after the forward, and the gradient waits for it
    ],
)
def test_a_rank_that_waits_for_a_gradient_recomputes_meanwhile(
    work: Schedule | Program, recompute: float, backward: tuple[float, float]
) -> None:
    timeline = simulate(work, Costs(recompute=[recompute, 0]))
    assert times(timeline)[0] == {"0F0": (0, 1), "0B0": backward}


def test_all_costs_zero_take_no_time() -> None:
    timeline = simulate(TWO_EACH, Costs(forward=0, input_grad=0, weight_grad=0))
    assert (timeline.makespan, timeline.step_bubble, timeline.span_bubble) == (0, 0, 0)


# Messages


def test_a_message_delays_its_reader_and_not_its_sender() -> None:
    timeline = simulate(TWO_EACH, Costs(transfer=2))
    assert times(timeline) == [
        {"0F0": (0, 1), "0F1": (1, 2), "0B0": (9, 11), "0B1": (11, 13)},
        {"1F0": (3, 4), "1F1": (4, 5), "1B0": (5, 7), "1B1": (7, 9)},
    ]
    assert ways(timeline) == {
        "0SEND_F0": (1, 3),
        "0SEND_F1": (2, 4),
        "1SEND_B0": (7, 9),
        "1SEND_B1": (9, 11),
    }


def test_a_value_and_its_gradient_take_the_transfer_of_the_stage_that_wrote_it() -> None:
    schedule = Schedule.from_text("0F0 0B0", "1F0 1B0", "2F0 2B0")
    assert times(simulate(schedule, Costs(transfer=[10, 20, 1000]))) == [
        {"0F0": (0, 1), "0B0": (67, 69)},
        {"1F0": (11, 12), "1B0": (55, 57)},
        {"2F0": (32, 33), "2B0": (33, 35)},
    ]


def test_stages_on_one_rank_exchange_without_a_message() -> None:
    timeline = simulate(V, Costs(transfer=5))
    assert times(timeline) == [
        {"0F0": (0, 1), "3F0": (13, 14), "3B0": (14, 16), "0B0": (30, 32)},
        {"1F0": (6, 7), "2F0": (7, 8), "2B0": (21, 23), "1B0": (23, 25)},
    ]
    assert set(ways(timeline)) == {"0SEND_F0", "2SEND_F0", "3SEND_B0", "1SEND_B0"}


def test_a_link_has_a_latency_for_each_direction() -> None:
    links = {(0, 1): Link(latency=3), (1, 0): Link(latency=10)}
    assert times(simulate(PAIR, Costs(links=links))) == [
        {"0F0": (0, 1), "0B0": (17, 19)},
        {"1F0": (4, 5), "1B0": (5, 7)},
    ]


def test_latency_comes_on_top_of_the_transfer_and_pairs_without_a_link_are_free() -> None:
    schedule = Schedule.from_text("0F0 0B0", "1F0 1B0", "2F0 2B0")
    timeline = simulate(schedule, Costs(transfer=1, links={(1, 2): Link(latency=4)}))
    assert ways(timeline) == {
        "0SEND_F0": (1, 2),
        "1SEND_F0": (3, 8),
        "2SEND_B0": (11, 12),
        "1SEND_B0": (14, 15),
    }


def test_one_link_for_all_joins_every_pair_of_ranks() -> None:
    assert ways(simulate(V, Costs(links=Link(latency=5)))) == ways(simulate(V, Costs(transfer=5)))


def test_bytes_take_their_time_on_the_link_and_messages_queue_for_it() -> None:
    timeline = simulate(TWO_EACH, Costs(message=6, links=Link(bandwidth=2)))
    assert ways(timeline) == {
        "0SEND_F0": (1, 4),
        "0SEND_F1": (4, 7),  # made at 2
        "1SEND_B0": (10, 13),
        "1SEND_B1": (13, 16),  # made at 12
    }
    assert times(timeline) == [
        {"0F0": (0, 1), "0F1": (1, 2), "0B0": (13, 15), "0B1": (16, 18)},
        {"1F0": (4, 5), "1F1": (7, 8), "1B0": (8, 10), "1B1": (10, 12)},
    ]


def test_a_gradient_has_as_many_bytes_as_the_value() -> None:
    timeline = simulate(PAIR, Costs(message=[6, 100], links=Link(bandwidth=2)))
    assert ways(timeline) == {"0SEND_F0": (1, 4), "1SEND_B0": (7, 10)}


def test_latency_does_not_keep_the_next_message_off_the_link() -> None:
    timeline = simulate(TWO_EACH, Costs(message=6, links=Link(latency=100, bandwidth=2)))
    assert ways(timeline)["0SEND_F0"] == (1, 104)
    assert ways(timeline)["0SEND_F1"] == (4, 107)


def test_the_two_directions_of_a_pair_of_ranks_do_not_queue_for_each_other() -> None:
    schedule = Schedule.from_text("0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2")
    links = {(0, 1): Link(bandwidth=1), (1, 0): Link(bandwidth=2)}
    timeline = simulate(schedule, Costs(message=8, links=links))
    assert ways(timeline) == {
        "0SEND_F0": (1, 9),
        "0SEND_F1": (9, 17),
        "0SEND_F2": (17, 25),
        "1SEND_B0": (12, 16),  # while 0SEND_F1 is on the way
        "1SEND_B1": (20, 24),
        "1SEND_B2": (28, 32),
    }


def test_messages_of_different_stages_queue_on_the_link_that_they_share() -> None:
    """Stages 0 and 2 are on rank 0, stages 1 and 3 on rank 1: two edges on the link from 0 to 1."""
    schedule = Schedule.from_text(
        "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1", "1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1"
    )
    links = {(0, 1): Link(bandwidth=1)}
    timeline = simulate(schedule, Costs(message=[10, 1, 4, 0], links=links))
    sent = {name: way for name, way in ways(timeline).items() if name[1:].startswith("SEND_F")}
    assert sent == {
        "0SEND_F0": (1, 11),
        "0SEND_F1": (11, 21),
        "1SEND_F0": (12, 12),
        "1SEND_F1": (22, 22),
        "2SEND_F0": (21, 25),  # made at 13
        "2SEND_F1": (25, 29),  # made at 23
    }


def test_a_skip_travels_on_its_own_link() -> None:
    schedule = build_schedule("gpipe", num_ranks=3, num_microbatches=1)
    program = lower(schedule, [*chain(3), (0, 2)])
    timeline = simulate(program, Costs(links={(0, 2): Link(latency=20), (2, 0): Link(latency=30)}))
    assert times(timeline) == [
        {"0F0": (0, 1), "0B0": (54, 56)},
        {"1F0": (1, 2), "1B0": (24, 26)},
        {"2F0": (21, 22), "2B0": (22, 24)},
    ]
    assert ways(timeline)["0SEND_F0>2"] == (1, 21)
    assert ways(timeline)["2SEND_B0>0"] == (24, 54)


def test_where_nothing_is_read_nothing_is_waited_for() -> None:
    program = lower(build_schedule("gpipe", num_ranks=3, num_microbatches=1), [(0, 2)])
    assert times(simulate(program))[1] == {"1F0": (0, 1), "1B0": (1, 3)}


def random_costs(num_stages: int, num_ranks: int, rng: Random, *, message: float) -> Costs:
    def some() -> list[float]:
        return [rng.choice([0.0, 1.0, rng.random()]) for _ in range(num_stages)]

    pairs = [(a, b) for a in range(num_ranks) for b in range(num_ranks) if a != b]
    links = {
        pair: Link(rng.random(), rng.choice([0.5, 2.0])) for pair in pairs if rng.random() < 0.7
    }
    return Costs(
        forward=some(), input_grad=some(), weight_grad=some(), recompute=some(), transfer=some(),
        message=message, links=links, activation=2, retained=some(), working_set=some(),
    )  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(schedule_names()),
    p=st.integers(1, 4),
    beyond=st.integers(0, 3),
    seed=st.integers(0, 2**32),
    message=st.sampled_from([0.0, 1.5]),
)
def test_a_schedule_and_its_program_give_the_same_timeline(
    name: str, p: int, beyond: int, seed: int, message: float
) -> None:
    schedule = build_schedule(name, num_ranks=p, num_microbatches=2 * p + beyond)
    costs = random_costs(schedule.num_stages, p, Random(seed), message=message)
    ours, lowered = simulate(schedule, costs), simulate(lower(schedule), costs)
    assert ours.spans == lowered.spans
    assert sorted(ours.transfers) == sorted(lowered.transfers)
    assert ours.memory == lowered.memory
    assert (
        (ours.name, ours.placement) == (lowered.name, lowered.placement) == (name, ours.placement)
    )


# Reductions and optimizer steps


def test_a_reduction_runs_beside_compute_and_the_step_waits_for_it() -> None:
    program = lower(Schedule.from_text("0F0 1F0 1B0 0B0"))
    timeline = simulate(program, Costs(reduce=[1, 3], step=[0.5, 0.25]))
    assert times(timeline) == [
        {
            "0F0": (0, 1),
            "1F0": (1, 2),
            "1B0": (2, 4),  # then the reduction of stage 1, until 7
            "0B0": (4, 6),
            "0STEP": (8, 8.5),  # the reduction of stage 0 follows that of stage 1
            "1STEP": (8.5, 8.75),
        }
    ]
    assert timeline.makespan == 8.75
    assert timeline.busy == (6.75,)


def test_each_rank_reduces_on_its_own() -> None:
    timeline = simulate(lower(PAIR), Costs(reduce=[1, 10], step=1))
    assert times(timeline) == [
        {"0F0": (0, 1), "0B0": (4, 6), "0STEP": (7, 8)},
        {"1F0": (1, 2), "1B0": (2, 4), "1STEP": (14, 15)},
    ]


def test_a_step_that_costs_nothing_is_not_shown() -> None:
    assert times(simulate(lower(PAIR))) == times(simulate(PAIR))


# Measures


def test_measures_of_uneven_stages() -> None:
    timeline = simulate(SPLIT, Costs(forward=[1, 5]))
    assert times(timeline) == [
        {"0F0": (0, 1), "0I0": (7, 8), "0W0": (8, 9)},
        {"1F0": (1, 6), "1I0": (6, 7), "1W0": (7, 8)},
    ]
    assert timeline.makespan == 9
    assert timeline.busy == (3.0, 7.0)
    assert timeline.rank_spans == (9.0, 7.0)
    assert timeline.step_bubble == pytest.approx(1 - 10 / 18)
    assert timeline.span_bubble == pytest.approx((9 - 3) / 9)


def test_the_longest_span_need_not_be_that_of_the_first_rank() -> None:
    timeline = simulate(SPLIT, Costs(forward=[1, 2], weight_grad=[1, 30]))
    assert timeline.rank_spans == (6.0, 33.0)
    assert (timeline.makespan, timeline.span_bubble) == (34, 0)
    assert timeline.step_bubble == pytest.approx(1 - 36 / 68)


@pytest.mark.parametrize(("p", "m"), [(2, 2), (4, 4), (4, 12)])
def test_the_bubble_of_gpipe_is_p_minus_1_over_m_plus_p_minus_1(p: int, m: int) -> None:
    timeline = simulate(build_schedule("gpipe", num_ranks=p, num_microbatches=m))
    assert timeline.step_bubble == pytest.approx((p - 1) / (m + p - 1))
    assert timeline.span_bubble == pytest.approx((p - 1) / (m + p - 1))


def test_one_rank_has_no_bubble() -> None:
    timeline = simulate(Schedule.from_text("0F0 0B0 0F1 0B1"))
    assert (timeline.makespan, timeline.step_bubble, timeline.span_bubble) == (6, 0, 0)


# Refused


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (("0F0 0B0 0F1 0B1", "1F1 1F0 1B0 1B1"), "ranks 0, 1 wait for each other"),
        (("0F0 0B0", "1F0 1I0"), "1W0 is missing"),
        (("0F0 0B0", "1F0"), "1I0 is missing"),
        (("0F0 0B0 0F1 0B1", "1F0 1B0"), "1F1 is missing"),
    ],
)
def test_a_schedule_that_would_not_end_is_refused(rows: tuple[str, ...], message: str) -> None:
    with pytest.raises(ScheduleError, match=f"^{message}"):
        simulate(Schedule.from_text(*rows))


def test_a_program_without_one_of_its_messages_is_refused() -> None:
    program = lower(PAIR)
    rows = tuple(tuple(a for a in row if str(a) != "0RECV_B0") for row in program.actions)
    with pytest.raises(ScheduleError, match=r"^0RECV_B0 is missing: add it\n"):
        simulate(Program(rows, program.placement, program.edges))


def test_costs_for_another_number_of_stages_are_refused() -> None:
    message = "^forward has 3 values, but the schedule has 2 stages: give one number, or 2 numbers$"
    with pytest.raises(CostsError, match=message):
        simulate(PAIR, Costs(forward=[1, 2, 3]))


def test_a_schedule_takes_the_time_of_its_program_with_reductions_and_steps() -> None:
    schedule, costs = Schedule.from_text("0F0 0B0", "1F0 1B0"), Costs(reduce=2, step=1)
    assert simulate(schedule, costs) == simulate(lower(schedule), costs)
    assert simulate(schedule, costs).makespan == 6 + 2 + 1
