"""Whatever happens to one rank, the others end soon and name it. `benchmarks/faults.py` has all."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import pytest
from tests.distributed.launch import launch
from tests.distributed.strike import strike
from tests.distributed.workers.faults import KINDS, PLACES

QUICK = (
    ("save", "SIGKILL", 1),
    ("background save", "SIGSTOP", 0),
    ("report", "SIGSTOP", 1),
    ("loader", "raise", 1),
)


def test_a_fault_ends_every_rank_with_the_name_of_the_culprit(tmp_path: Path) -> None:
    check(QUICK, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_any_fault_anywhere_ends_every_rank(tmp_path: Path) -> None:
    check([(place, kind, 1) for place, kind in product(PLACES, KINDS)], tmp_path)


def check(cases: Sequence[tuple[str, str, int]], folder: Path) -> None:
    """Two at once: most of their time they wait for a timeout."""
    folders = [folder / str(number) for number in range(len(cases))]
    for own in folders:
        own.mkdir()
    with ThreadPoolExecutor(2) as pool:
        struck = [pool.submit(strike, *case, own) for case, own in zip(cases, folders, strict=True)]
    for case, ended in zip(cases, struck, strict=True):
        assert ended.result().problem is None, (case, ended.result().problem)


def test_one_rank_that_saves_alone_is_told_who_does_not_take_part(tmp_path: Path) -> None:
    first, second = launch("alone", 2, "save", str(tmp_path), timeout=60.0)
    assert first.code == 1
    assert "rank 1" in first.output.rpartition("StageError: ")[2], first.output
    assert "sharing a checkpoint" in first.output + second.output
    assert second.code == 1


def test_a_rank_that_saves_alone_before_the_first_step_and_the_other_say_so(tmp_path: Path) -> None:
    for ended in launch("alone", 2, "first", str(tmp_path), timeout=60.0):
        assert ended.code == 1
        assert "rank 0 shares a checkpoint or report while rank 1 shares" in ended.output
        assert "make the same calls on all ranks" in ended.output


@pytest.mark.parametrize(
    "where",
    [
        "first step",
        pytest.param("write", marks=pytest.mark.slow),
        pytest.param("pipeline", marks=pytest.mark.slow),
        pytest.param("read", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_starts_late_or_takes_long_for_a_checkpoint_is_waited_for(
    where: str, tmp_path: Path
) -> None:
    for ended in launch("late", 2, where, str(tmp_path), timeout=90.0):
        assert ended.code == 0, ended.output
        assert "trained" in ended.output


@pytest.mark.slow
def test_a_rank_that_is_late_for_a_later_step_is_not(tmp_path: Path) -> None:
    first, _ = launch("late", 2, "second step", str(tmp_path), timeout=60.0)
    assert first.code == 1
    assert "has waited 3 s for 1SEND_B0" in first.output
