"""Traces of devices in several processes."""

from __future__ import annotations

import json

import pytest
from tests.distributed.launch import launch


def test_a_message_between_devices_was_sent_when_what_made_it_had_ended() -> None:
    """It has no header that tells; every process sees the times of all."""
    ends = launch("traces", 2)
    assert [ended.code for ended in ends] == [0, 0], ends
    first, second = (json.loads(ended.output) for ended in ends)
    shift = second["0F0"][0] - first["0F0"][0]  # processes begin to count at other times
    for action, times in first.items():
        assert [t - shift if t else t for t in second[action]] == pytest.approx(times, abs=1e-5)
    for action, sender in {"1F0": "0F0", "1F1": "0F1", "0B0": "1B0", "0B1": "1B1"}.items():
        asked, sent, start, end = first[action]
        assert sent == pytest.approx(first[sender][3], abs=1e-6)
        assert asked <= start
        assert sent <= start <= end
    assert [first[action][1] for action in ("0F0", "1B0")] == [0.0, 0.0]
