"""Worlds of 64 to 1,024 ranks: all of them make the same groups, and agree on each channel."""

from __future__ import annotations

import pytest
from tests.distributed.worlds import world_of

import stageline as sl
from stageline.schedules.edges import Edge, chain
from stageline.schedules.program.lower_period import lower_period

SKIPS: tuple[Edge, ...] = ((0, 5), (2, 40), (7, 63))
SMALL = [
    ("gpipe", 64, 4, 1),
    ("interleaved_1f1b", 16, 16, 4),
    ("pipedream_2bw", 16, 16, 1),
    ("1f1b", 256, 4, 1),
]
LARGE = [
    ("1f1b", 1024, 8, 1),
    ("1f1b", 128, 8, 8),
    ("zb_h1", 256, 16, 1),
    ("zbv", 64, 64, 1),
    ("dualpipe_v", 64, 128, 1),
    ("interleaved_1f1b", 64, 64, 1),
    ("looped_bfs", 64, 64, 1),
    ("hanayo", 64, 64, 1),
    ("pipedream", 64, 1, 1),
    ("pipedream_2bw", 64, 64, 1),
]


@pytest.mark.parametrize(
    ("family", "num_ranks", "num_microbatches", "num_replicas"),
    [*SMALL, *(pytest.param(*world, marks=pytest.mark.slow) for world in LARGE)],
)
def test_all_ranks_make_the_same_groups_and_issue_the_same_messages_on_each_channel(
    family: str, num_ranks: int, num_microbatches: int, num_replicas: int
) -> None:
    num_channels, num_messages = check_world(family, num_ranks, num_microbatches, num_replicas)
    assert num_channels >= 2 * (num_ranks - 1) * num_replicas
    assert num_messages >= 2 * (num_ranks - 1) * num_microbatches


def check_world(
    family: str, num_ranks: int, num_microbatches: int, num_replicas: int
) -> tuple[int, int]:
    """Return how many channels there are, and how many messages of the first replica."""
    schedule = sl.build_schedule(family, num_ranks=num_ranks, num_microbatches=num_microbatches)
    edges = (*chain(schedule.num_stages), *(SKIPS if schedule.num_stages == 64 else ()))
    period = lower_period(schedule, edges)
    world = world_of(period, num_replicas, num_minibatches=period.lag + 2 if period.lag else 1)
    assert len(world.groups) == num_ranks * num_replicas
    assert len(set(world.groups)) == 1
    assert world.sent == world.received
    return len(world.groups[0]), sum(map(len, world.sent.values()))
