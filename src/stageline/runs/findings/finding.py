"""Define `Finding`: something that makes a run slow, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass

LEAST_GAIN = 3.0  # percent; medians of three steps differ by this much from report to report


@dataclass(frozen=True)
class Finding:
    """Something that makes a run slow.

    >>> finding = Finding("uneven stages", "stage 1 takes 9 ms of 12", "use balance=[2, 2]", 21.4)
    >>> print(finding)
    uneven stages: stage 1 takes 9 ms of 12; use balance=[2, 2] (a step takes 21 % less time)
    """

    title: str
    measured: str  # what was seen
    advice: str
    gain: float | None  # expected: percent less time for a step; None if it cannot be said

    def __str__(self) -> str:
        gain = "" if self.gain is None else f" (a step takes {self.gain:.0f} % less time)"
        return f"{self.title}: {self.measured}; {self.advice}{gain}"
