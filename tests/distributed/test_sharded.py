"""`fully_shard` beside replicas and stages, on four processes: a plain loop's numbers."""

from __future__ import annotations

import pytest
from tests.distributed.launch import launch


def assert_says(worker_part: str, text: str) -> None:
    for ended in launch("sharded", 4, worker_part):
        assert ended.code == 0, ended.output
        assert text in ended.output


def test_every_kind_of_schedule_trains_layers_in_shards() -> None:
    assert_says("schedules", "all equal but for rounding")


@pytest.mark.slow
def test_other_schedules_train_layers_in_shards() -> None:
    assert_says("more_schedules", "all equal but for rounding")


def test_checkpoints_are_read_with_other_shards_and_without_any() -> None:
    assert_says("checkpoints", "checkpoints equal")


def test_evaluation_losses_outside_own_optimizers_and_bf16() -> None:
    assert_says("other", "other ways equal")


def test_what_cannot_be_trained_in_shards_is_refused_and_meta_weights_are_the_same() -> None:
    assert_says("refusals", "refused, and the same weights")
