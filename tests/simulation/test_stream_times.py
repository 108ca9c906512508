"""Times of streams: no bubble between fill and drain without a flush, and the cost of a flush."""

import pytest

from stageline.costs import Costs, Link
from stageline.report.timeline import Timeline
from stageline.schedules.action import Kind
from stageline.schedules.build import build_schedule
from stageline.schedules.schedule import Schedule
from stageline.simulation.simulate import simulate


def stream(name: str, p: int, m: int, count: int) -> Timeline:
    schedule = build_schedule(name, num_ranks=p, num_microbatches=m, num_minibatches=count)
    return simulate(schedule)


@pytest.mark.parametrize("p", range(1, 6))
@pytest.mark.parametrize("m", [1, 3])
def test_pipedream_keeps_all_ranks_busy_between_fill_and_drain(p: int, m: int) -> None:
    assert stream("pipedream", p, m, 12).steady_busy == (1.0,) * p


@pytest.mark.parametrize("p", range(1, 6))
def test_2bw_keeps_all_ranks_busy_between_fill_and_drain(p: int) -> None:
    assert stream("pipedream_2bw", p, p + 1, 6).steady_busy == (1.0,) * p


@pytest.mark.parametrize(("p", "m"), [(2, 2), (4, 4), (4, 8)])
def test_1f1b_loses_its_bubble_in_every_mini_batch_of_a_stream(p: int, m: int) -> None:
    bubble = (p - 1) / (m + p - 1)
    assert stream("1f1b", p, m, 5).step_bubble == pytest.approx(bubble)
    assert max(stream("1f1b", p, m, 40).steady_busy) == pytest.approx(1 - bubble, abs=0.01)


@pytest.mark.parametrize("name", ["pipedream", "pipedream_2bw", "1f1b"])
def test_one_more_mini_batch_takes_its_work_and_with_a_flush_the_bubble(name: str) -> None:
    p, m = 4, 4
    longer = stream(name, p, m, 9).makespan - stream(name, p, m, 8).makespan
    assert longer == 3 * (m + p - 1 if name == "1f1b" else m)


def test_ranks_of_a_synchronous_stream_begin_the_next_mini_batch_as_soon_as_they_can() -> None:
    """Rank 1 is ready at 7; rank 0 ends its step at 9 and sends its next output at 10."""
    timeline = stream("1f1b", 2, 2, 2)
    starts = [
        {str(span.action): span.start for span in row if span.action.microbatch >= 2}
        for row in timeline.spans
    ]
    assert starts[0]["0F2@1"] == 9
    assert starts[1]["1F2@1"] == 10


def test_a_stream_that_drains_before_it_is_full_has_no_steady_state() -> None:
    assert stream("pipedream", 4, 1, 3).steady_busy == ()
    assert simulate(Schedule.from_text("0F0 0B0")).steady_busy == ()


def test_steady_busy_tells_the_ranks_that_wait_for_a_slow_one() -> None:
    schedule = build_schedule("pipedream", num_ranks=3, num_microbatches=1, num_minibatches=40)
    costs = Costs(forward=[1, 2, 1], input_grad=[1, 2, 1], weight_grad=[1, 2, 1])
    assert simulate(schedule, costs).steady_busy == pytest.approx((0.5, 1.0, 0.5), abs=0.02)


def test_a_step_of_replicas_waits_for_the_slowest_of_them() -> None:
    """Rank 0 is done with 0B0 at 9, rank 1 with 0B1 at 12; both step at 12, then 0F4 and 0F5."""
    schedule = build_schedule(
        "pipedream", num_ranks=3, num_microbatches=2, num_minibatches=3, replicas=[2, 1]
    )
    costs = Costs(forward=[2, 1], input_grad=[2, 1], weight_grad=[2, 1])
    first, second, _ = (
        [(str(span.action), span.start, span.end) for span in row[2:5]]
        for row in simulate(schedule, costs).spans
    )
    assert first == [("0B0@0", 5, 9), ("0STEP@1", 12, 12), ("0F4@1", 12, 14)]
    assert second == [("0B1@0", 8, 12), ("0STEP@1", 12, 12), ("0F5@1", 12, 14)]


def test_replicas_of_a_slow_stage_keep_pace_with_a_fast_one() -> None:
    """Three ranks of a stage that takes three times as long keep pace with one of the other."""
    ends = []
    for count in (20, 21):
        schedule = build_schedule(
            "pipedream", num_ranks=4, num_microbatches=3, num_minibatches=count, replicas=[3, 1]
        )
        costs = Costs(forward=[3, 1], input_grad=[3, 1], weight_grad=[3, 1])
        ends.append(simulate(schedule, costs).makespan)
    assert ends[1] - ends[0] == 3 * 3


def test_steps_take_their_time_where_costs_say_so() -> None:
    schedule = build_schedule("pipedream", num_ranks=1, num_microbatches=1, num_minibatches=3)
    timeline = simulate(schedule, Costs(reduce=0.25, step=0.5))
    steps = [(s.start, s.end) for s in timeline.spans[0] if s.action.kind is Kind.STEP]
    assert steps == [(3.25, 3.75), (7.0, 7.5), (10.75, 11.25)]


def test_a_message_to_a_replica_takes_the_link_of_its_rank() -> None:
    schedule = build_schedule(
        "pipedream", num_ranks=3, num_microbatches=2, num_minibatches=1, replicas=[1, 2]
    )
    timeline = simulate(schedule, Costs(links={(0, 2): Link(latency=5)}))
    ways = [(str(t.send), t.source, t.target, t.end - t.start) for t in timeline.transfers]
    assert ways[:2] == [("0SEND_F0", 0, 1, 0), ("0SEND_F1", 0, 2, 5)]
