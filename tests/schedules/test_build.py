"""Names, sizes and options that `build_schedule` takes, and its errors for others."""

import re
from typing import Any

import pytest

from stageline.errors import ScheduleError
from stageline.schedules.build import build_schedule, schedule_names
from stageline.schedules.families.interleaved_1f1b import interleaved_1f1b


def refused(message: str) -> Any:
    return pytest.raises(ScheduleError, match=f"^{re.escape(message)}$")


@pytest.mark.parametrize("name", schedule_names())
def test_a_schedule_bears_its_name_and_has_the_sizes_asked_for(name: str) -> None:
    schedule = build_schedule(name, num_ranks=3, num_microbatches=7)
    assert (schedule.name, schedule.num_ranks, schedule.num_microbatches) == (name, 3, 7)
    assert sorted(set(schedule.placement)) == [0, 1, 2]


def test_names_are_known_once_each() -> None:
    assert len(set(schedule_names())) == len(schedule_names()) >= 14


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("1F1B", "1f1b"),
        ("interleaved", "interleaved_1f1b"),
        ("zb-v", "zbv"),
        ("dualpipe", "dualpipe_v"),
    ],
)
def test_a_misspelled_name_gets_a_suggestion(name: str, meant: str) -> None:
    with refused(f"schedule {name!r} is not known: did you mean {meant!r}?"):
        build_schedule(name, num_ranks=2, num_microbatches=4)


def test_an_unknown_name_gets_the_list_of_all() -> None:
    names = schedule_names()
    listed = f"{', '.join(names[:-1])} or {names[-1]}"
    with refused(f"schedule 'quux' is not known: use one of {listed}"):
        build_schedule("quux", num_ranks=2, num_microbatches=4)


@pytest.mark.parametrize("size", [0, -1, True, 2.0, "2", None])
@pytest.mark.parametrize("name", ["num_ranks", "num_microbatches"])
def test_a_size_that_is_not_a_positive_integer_is_rejected(name: str, size: Any) -> None:
    sizes = {"num_ranks": 2, "num_microbatches": 4} | {name: size}
    with refused(f"{name} is {size!r}, but has to be a whole number from 1 up"):
        build_schedule("1f1b", **sizes)


@pytest.mark.parametrize("chunks", [0, -2, 1.5, True])
def test_an_invalid_number_of_chunks_is_rejected(chunks: Any) -> None:
    message = f"chunks_per_rank is {chunks!r}, but has to be a whole number from 1 up"
    with refused(message):
        build_schedule("looped_bfs", num_ranks=2, num_microbatches=4, chunks_per_rank=chunks)


def test_an_option_that_a_family_does_not_take_is_refused_with_those_that_do() -> None:
    message = (
        "chunks_per_rank was given for '1f1b', which takes none: omit it, "
        "or use interleaved_1f1b, looped_bfs or hanayo"
    )
    with refused(message):
        build_schedule("1f1b", num_ranks=2, num_microbatches=4, chunks_per_rank=2)
    with pytest.raises(
        ScheduleError, match=r"^seed was given for 'looped_bfs', which takes chunks_per"
    ):
        build_schedule("looped_bfs", num_ranks=2, num_microbatches=4, seed=1)


def test_options_reach_their_family() -> None:
    built = build_schedule(
        "interleaved_1f1b", num_ranks=2, num_microbatches=6, chunks_per_rank=3, group_size=3
    )
    assert built == interleaved_1f1b(2, 6, chunks_per_rank=3, group_size=3)
    assert built.num_stages == 6
