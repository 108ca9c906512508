"""Mixed precision on several processes: the bits of one process."""

from __future__ import annotations

from tests.distributed.launch import launch


def test_two_processes_have_the_bits_of_one() -> None:
    for ended in launch("precision", 2):
        assert ended.code == 0, ended.output
        assert "equal" in ended.output
