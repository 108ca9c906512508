"""Layers that differentiate, and hooks on weights that layers of several processes share."""

from __future__ import annotations

from tests.distributed.launch import launch


def test_layers_that_differentiate_and_hooks_are_those_of_a_plain_loop() -> None:
    for ended in launch("inner", 2, "equal"):
        assert ended.code == 0, ended.output
        assert "equal" in ended.output


def test_hooks_on_one_of_the_ranks_that_share_a_weight_are_refused() -> None:
    for ended in launch("inner", 2, "disagree", timeout=60.0):
        assert ended.code == 1, ended.output
        assert "has hooks on [0] only, but is used on [0, 1]" in ended.output
