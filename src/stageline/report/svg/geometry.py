"""Compute the sizes and positions in an SVG picture, for 2 ranks as well as for 200."""

from __future__ import annotations

import math
from typing import NamedTuple

from stageline.report.timeline import Timeline

LEFT, RIGHT, TOP, BOTTOM = 64.0, 64.0, 92.0, 40.0
MIN_WIDTH, MAX_WIDTH = 720.0, 1600.0  # of the lanes
MIN_PITCH, MAX_PITCH = 12.0, 58.0  # from one rank to the next
LANES_HEIGHT = 1000.0  # shared by the ranks, within the limits of the pitch
USUAL_ACTION = 26.0  # the width of an action, if the lanes are not too wide then
MAX_FONT = 12.0
DIGIT = 0.58  # the width of a digit, in font sizes
CAPITAL = 0.72  # its height


class Geometry(NamedTuple):
    """The sizes of a picture, in pixels."""

    scale: float  # per unit of time
    lane: float  # height of a rank's lane
    memory: float  # height of the memory curve below it
    pitch: float  # from one rank to the next
    lanes_width: float
    num_ranks: int
    usual_width: float  # of an action
    font: float  # of the labels inside the lanes
    min_font: float  # labels in a smaller font are omitted
    most_held: float  # the memory that takes the full height of the curve

    @property
    def width(self) -> float:
        return LEFT + self.lanes_width + RIGHT

    @property
    def height(self) -> float:
        return TOP + self.num_ranks * self.pitch + BOTTOM

    @property
    def memory_top(self) -> float:
        """Return the top of the memory curve, a little below the rank's lane."""
        return self.lane + 0.08 * self.pitch

    @property
    def edge(self) -> float:
        """Return the width of the white line between actions."""
        return min(0.8, 0.06 * self.usual_width)

    @property
    def tick(self) -> float:
        """Return the width of the mark of an optimizer step that takes no time."""
        return min(1.6, 0.12 * self.usual_width)

    @property
    def small_font(self) -> float:
        """Return the font size of weight versions."""
        return 0.62 * self.font

    @property
    def margin(self) -> float:
        """Return the distance between a version and the edges of its action."""
        return 0.3 * self.small_font

    @property
    def dot(self) -> float:
        return min(2.2, 0.05 * self.pitch)

    def x(self, time: float) -> float:
        """Return the position of a time, from the left end of the lanes."""
        return time * self.scale

    def y(self, held: float) -> float:
        """Return the position of an amount of memory, from the top of the curve."""
        return self.memory * (1 - held / self.most_held) if self.most_held else self.memory

    @property
    def is_labelled(self) -> bool:
        return self.font >= self.min_font

    def fits(self, label: str, duration: float) -> bool:
        """Return whether a label fits in an action of this duration."""
        return self.is_labelled and len(label) * DIGIT * self.font < self.x(duration)

    def fits_small(self, label: str, duration: float) -> bool:
        """Return whether a small label fits in a corner, above the label in the middle."""
        width = len(label) * DIGIT * self.small_font + 2 * self.margin
        height = CAPITAL * self.small_font + self.margin
        has_space = height < (self.lane - CAPITAL * self.font) / 2 and width < self.x(duration)
        return self.is_labelled and has_space


def geometry_of(timeline: Timeline, min_font: float) -> Geometry:
    """Return sizes that suit a timeline."""
    usual = _usual_duration(timeline)
    width = _within(MIN_WIDTH, USUAL_ACTION * timeline.makespan / usual, MAX_WIDTH)
    scale = width / timeline.makespan if timeline.makespan else 0.0
    pitch = _within(MIN_PITCH, LANES_HEIGHT / max(timeline.num_ranks, 1), MAX_PITCH)
    lane, memory, gap = 0.48 * pitch, 0.3 * pitch, 0.22 * pitch
    if not any(timeline.memory):
        memory = 0.0
    return Geometry(
        scale,
        lane,
        memory,
        lane + memory + gap,
        width,
        timeline.num_ranks,
        usual_width=scale * usual,
        font=min(MAX_FONT, 0.65 * lane, 0.8 * scale * usual / (DIGIT * _num_digits(timeline))),
        min_font=min_font,
        most_held=max(timeline.peak_memory, default=0.0),
    )


def axis_times(makespan: float, num_ticks: int = 12) -> list[float]:
    """Return about `num_ticks` round times for the axis.

    >>> axis_times(33.0)
    [0.0, 5.0, 10.0, 15.0, 20.0, 25.0, 30.0]
    """
    if not makespan:
        return [0.0]
    power = 10.0 ** math.floor(math.log10(makespan / num_ticks))
    step = next(power * i for i in (1, 2, 5, 10) if power * i * num_ticks >= makespan)
    return [i * step for i in range(int(makespan / step + 1e-9) + 1)]


def _usual_duration(timeline: Timeline) -> float:
    """Return the first quartile of the durations."""
    durations = sorted(
        end - start for row in timeline.spans for _, start, end in row if end > start
    )
    return durations[len(durations) // 4] if durations else 1.0


def _num_digits(timeline: Timeline) -> int:
    return max(
        (len(str(span.action.microbatch)) for row in timeline.spans for span in row), default=1
    )


def _within(low: float, value: float, high: float) -> float:
    return min(max(low, value), high)
