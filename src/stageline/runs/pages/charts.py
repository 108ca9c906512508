"""Draw curves over the steps of a run, or of several runs over each other, as SVG."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from stageline.report.summary import number, tick_numbers
from stageline.report.svg.drawing import xml
from stageline.report.svg.geometry import axis_times
from stageline.report.svg.lane_elements import px
from stageline.runs.files import evenly

WIDTH, HEIGHT = 480.0, 210.0  # of the drawing, which is scaled to the page
LEFT, RIGHT, TOP, BOTTOM = 52.0, 24.0, 10.0, 36.0
MOST_DRAWN_POINTS = 600  # of a curve: more than there are pixels
NUM_TICKS = 4
MIDDLE = 4.0  # from the middle of a letter to its foot


@dataclass(frozen=True)
class Curve:
    """Values by step; None is a gap."""

    name: str
    css: str
    points: Sequence[tuple[int, float | None]]


def chart(title: str, curves: Iterable[Curve], unit: str = "") -> str:
    """Return a figure with curves; nothing if there is no point to draw."""
    drawn = [curve for curve in curves if any(y is not None for _, y in curve.points)]
    if not drawn:
        return ""
    frame = _Frame.around(drawn)
    extent = f'viewBox="0 0 {px(WIDTH)} {px(HEIGHT)}"'
    lines = [
        f'<svg class="chart" {extent} role="img" aria-label="{xml(title)}">',
        *_axes(frame),
        *(part for curve in drawn for part in _curve(curve, frame)),
        "</svg>",
    ]
    words = f"{title}, {unit}" if unit else title
    return "\n".join(["<figure>", f"<figcaption>{xml(words)}</figcaption>", *lines, "</figure>"])


@dataclass(frozen=True)
class _Frame:
    """The ranges of both axes."""

    first: float
    last: float
    low: float
    high: float

    @staticmethod
    def around(curves: Sequence[Curve]) -> _Frame:
        steps = [float(step) for curve in curves for step, _ in curve.points]
        values = [y for curve in curves for _, y in curve.points if y is not None]
        low, high = min(values), max(values)
        if low >= 0 and low < 0.4 * high:
            low = 0.0  # a scale that begins at 0, unless most of it would be empty
        margin = 0.06 * (high - low) or 0.06 * abs(high) or 1.0
        return _Frame(min(steps), max(steps), low - margin * (low != 0), high + margin)

    def x(self, step: float) -> float:
        share = (step - self.first) / (self.last - self.first) if self.last > self.first else 0.5
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return (
            HEIGHT - BOTTOM - (value - self.low) / (self.high - self.low) * (HEIGHT - TOP - BOTTOM)
        )


def _axes(frame: _Frame) -> Iterator[str]:
    values = _round_values(frame.low, frame.high)
    for value, words in zip(values, tick_numbers(values), strict=True):
        y = px(frame.y(value))
        yield f'<path class="grid" d="M{px(LEFT)} {y}H{px(WIDTH - RIGHT)}"/>'
        yield _text(LEFT - 6, frame.y(value) + MIDDLE, "end", words)
    steps = [step for step in _round_values(frame.first, frame.last) if step == int(step)]
    for step, words in zip(steps, tick_numbers(steps), strict=True):
        yield _text(frame.x(step), HEIGHT - BOTTOM + 16, "middle", words)
    yield _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 4, "middle", "step")


def _text(x: float, y: float, anchor: str, words: str) -> str:
    return f'<text x="{px(x)}" y="{px(y)}" text-anchor="{anchor}">{words}</text>'


def _curve(curve: Curve, frame: _Frame) -> Iterator[str]:
    path, points, is_open = "", 0, False
    for step, value in evenly(curve.points, MOST_DRAWN_POINTS):
        if value is None:
            is_open = False
            continue
        path += f"{'L' if is_open else 'M'}{px(frame.x(step))} {px(frame.y(value))}"
        is_open, points = True, points + 1
    yield f'<path class="{curve.css} curve" d="{path}"><title>{xml(curve.name)}</title></path>'
    step, value = next((s, y) for s, y in reversed(curve.points) if y is not None)
    yield (
        f'<circle class="{curve.css} point" cx="{px(frame.x(step))}" cy="{px(frame.y(value))}" '
        f'r="3"><title>{xml(f"{curve.name}: {number(value)} at step {step}")}</title></circle>'
    )


def _round_values(low: float, high: float) -> list[float]:
    """Return round values within a range."""
    if high <= low:
        return [low]
    ticks = axis_times(high - low, NUM_TICKS)
    distance = ticks[1] if len(ticks) > 1 else high - low
    first = -(-low // distance)
    count = int((high - first * distance) / distance + 1e-9) + 1
    return [(first + place) * distance for place in range(max(count, 0))]
