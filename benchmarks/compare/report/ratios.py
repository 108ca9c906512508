"""Paired ratios: what one contestant takes over what another takes in the same round.

Both have the same weather in a round, so that ratios vary less than times. The interval of a median
is between two of the sorted ratios, whatever their distribution: that of n ratios is above the
k-th smallest unless fewer than k of them are below it, and each is so with probability 1/2.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import comb
from statistics import median
from typing import NamedTuple

CONFIDENCE = 0.95


class Ratio(NamedTuple):
    """The median of paired ratios with its interval, and the confidence that the interval has."""

    median: float
    low: float
    high: float
    confidence: float

    def __str__(self) -> str:
        text = f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"
        return text if self.confidence >= CONFIDENCE else f"{text} ({100 * self.confidence:.0f} %)"


def paired(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
    """Return the ratio of two contestants' times, which are in the order of the rounds.

    >>> print(paired([2.0, 4.0, 6.0], [1.0, 2.0, 2.0]))
    2.000 [2.000, 3.000] (75 %)
    """
    ratios = [a / b for a, b in zip(numerators, denominators, strict=True)]
    return median_with_interval(ratios)


def median_with_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Ratio:
    """Return the median with the narrowest interval that has at least this confidence.

    With fewer than six values there is none: then it is from the least to the largest, and
    `confidence` says how little that is.

    >>> found = median_with_interval(range(1, 16))
    >>> found.low, found.high, round(found.confidence, 3)
    (4, 12, 0.965)
    >>> median_with_interval([1.0, 2.0, 3.0]).confidence
    0.75
    """
    ordered, count = sorted(values), len(values)
    dropped = 0  # at each end
    while 2 * (dropped + 1) < count and _confidence(count, dropped + 1) >= confidence:
        dropped += 1
    bounds = ordered[dropped], ordered[count - 1 - dropped]
    return Ratio(median(ordered), *bounds, _confidence(count, dropped))


def _confidence(count: int, dropped: int) -> float:
    """Return how likely a median is within `count` values without so many at each end."""
    outside: int = sum(comb(count, below) for below in range(dropped + 1))
    return 1 - 2 * outside / 2.0**count
