"""When a value of a step is far above those of the steps before."""

from __future__ import annotations

import pytest

from stageline.runtime.optimizers.divergence import FACTOR, MIN_STEPS, MedianLimit


@pytest.mark.parametrize("usual", [0.01, 1.0, 100.0])
def test_the_limit_is_a_multiple_of_the_median_whatever_its_size(usual: float) -> None:
    limit = MedianLimit()
    assert [limit.check("the loss", usual) for _ in range(MIN_STEPS)] == [None] * MIN_STEPS
    assert limit.check("the loss", 0.99 * FACTOR * usual) is None
    found = limit.check("the loss", 1.01 * FACTOR * usual)
    assert found == (
        f"the loss is {1.01 * FACTOR * usual:.3g}, but the median of earlier steps was {usual:.3g}"
    )


def test_there_is_no_limit_before_there_is_a_median() -> None:
    limit = MedianLimit()
    values = [1.0] * (MIN_STEPS - 1) + [1e9]
    assert [limit.check("the loss", value) for value in values] == [None] * MIN_STEPS
