"""Define `Finding`: something that makes a run slow, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass

LEAST_GAIN = 3.0  # percent; medians of three steps differ by this much from report to report


@dataclass(frozen=True)
class Finding:
    """Something that makes a run slow.

    >>> finding = Finding("uneven stages", "stage 1 takes 9 ms of 12", "use balance=[2, 2]", 21.4)
    >>> print(finding)
    -21 %  uneven stages: use balance=[2, 2]. Stage 1 takes 9 ms of 12.
    """

    title: str
    measured: str  # what was seen
    advice: str
    gain: float | None  # expected: percent less time for a step; None if it cannot be said

    def __str__(self) -> str:
        gain = f"-{self.gain:.0f} %" if self.gain else "note"
        measured = f"{self.measured[:1].upper()}{self.measured[1:]}"
        return f"{gain:>5}  {self.title}: {self.advice}. {measured}."
