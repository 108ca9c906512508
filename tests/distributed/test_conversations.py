"""What goes on at the same time does not get in its own way."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.distributed.launch import launch


@pytest.mark.parametrize(
    ("num_ranks", "lines"),
    [
        (2, ["9 10 background", "3 2 background", "1 1 background", "2 3 stream", "2 1 waiting"]),
        pytest.param(3, ["9 10 background", "1 2 stream"], marks=pytest.mark.slow),
    ],
)
def test_fit_saves_in_the_background_and_reports_in_between(
    num_ranks: int, lines: list[str], tmp_path: Path
) -> None:
    """`benchmarks/fit_pairs.py` has all pairs of intervals up to ten, on 2, 3 and 4 processes."""
    path = tmp_path / "runs"
    path.write_text("\n".join(lines))
    ends = launch("fit_pairs", num_ranks, str(tmp_path), str(path), timeout=100.0)
    assert [ended.code for ended in ends] == [0] * num_ranks, ends
    assert ends[0].output.count("done ") == len(lines)


def test_everything_can_be_done_while_saves_of_two_pipelines_go_on(tmp_path: Path) -> None:
    for ended in launch("conversations", 2, str(tmp_path), timeout=100.0):
        assert ended.code == 0, ended.output
        assert "all is done" in ended.output
