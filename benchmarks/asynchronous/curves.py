"""Curves of loss as an SVG: a panel for each optimizer and number of micro-batches.

loss │ ╲                 solid: at the best rate of each schedule
     │  ╲__╲___          dashed: at 1f1b's best rate, where that is another
     │   ╲_____          ×: it has diverged
     └───────── tokens
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from statistics import fmean

from benchmarks.asynchronous.outcome import (
    Outcome,
    Way,
    best_rates,
    over_seeds,
    shared_rate,
)

from stageline.report.svg.geometry import axis_times

# Okabe and Ito's palette, as in report/palette.py
COLOURS = {
    "1f1b": "#0072B2",
    "pipedream": "#D55E00",
    "vertical sync": "#009E73",
    "2BW": "#CC79A7",
}
WIDTH, HEIGHT, GAP = 400.0, 250.0, 62.0  # of a panel, and between two
LEFT, TOP = 52.0, 74.0
SMOOTH = 0.05  # the part of a training that a point is the mean of
HEADROOM = 1.5  # nats above the least loss, the rest of the first steps is cut off

STYLE = """
text{font-family:"Helvetica Neue",Helvetica,Arial,sans-serif;font-size:12px;fill:#444}
.title{font-size:17px;font-weight:600;fill:#222}.panel{font-size:13px;font-weight:600;fill:#222}
.axis{font-size:11px;fill:#666}.right{text-anchor:end}.middle{text-anchor:middle}
.grid{stroke:#E4E4E4;fill:none}.frame{stroke:#999;fill:none}
.curve{fill:none;stroke-width:1.8;stroke-linejoin:round}.same{stroke-dasharray:5 3;stroke-width:1.3}
.end{stroke-width:2.2;fill:none}
"""

Curve = list[float]  # a loss for each update, as long as it is finite


def picture(outcomes: Sequence[Outcome], tokens_per_update: int) -> str:
    """Training losses, smoothed, means over seeds."""
    ways = dict.fromkeys(outcome.setting.way for outcome in outcomes)
    rows = list(dict.fromkeys(outcome.setting.optimizer for outcome in outcomes))
    columns = list(dict.fromkeys(way.num_microbatches for way in ways))
    width = LEFT + len(columns) * (WIDTH + GAP) - 30
    height = TOP + len(rows) * (HEIGHT + GAP) + 4
    elements = [*_header(ways)]
    for row, optimizer in enumerate(rows):
        for column, m in enumerate(columns):
            shift = LEFT + column * (WIDTH + GAP), TOP + 22 + row * (HEIGHT + GAP)
            here = [way for way in ways if way.num_microbatches == m]
            elements.append(f'<g transform="translate({shift[0]:g} {shift[1]:g})">')
            elements += _panel(outcomes, optimizer, here, tokens_per_update)
            elements.append("</g>")
    extent = f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {extent} role="img">',
            f"<style>{STYLE}</style>",
            f'<clipPath id="panel"><rect width="{WIDTH:g}" height="{HEIGHT:g}"/></clipPath>',
            '<rect width="100%" height="100%" fill="#FFF"/>',
            *elements,
            "</svg>\n",
        ]
    )


def _header(ways: Iterable[Way]) -> Iterator[str]:
    yield f'<text class="title" x="{LEFT:g}" y="26">Training loss, 4 stages</text>'
    x = LEFT
    for name in dict.fromkeys(way.name for way in ways):
        yield f'<path class="curve" stroke="{COLOURS[name]}" d="M{x:g} 47h24"/>'
        yield f'<text x="{x + 30:g}" y="51">{name}</text>'
        x += 58 + 5.6 * len(name)
    yield f'<path class="curve same" stroke="#666" d="M{x:g} 47h24"/>'
    yield f'<text x="{x + 30:g}" y="51">at the best rate of 1f1b, where its own is another</text>'
    x += 300
    yield f'<path class="end" stroke="#666" d="{_cross(x + 8, 47)}"/>'
    yield f'<text x="{x + 20:g}" y="51">has diverged</text>'


def _panel(
    outcomes: Sequence[Outcome], optimizer: str, ways: Sequence[Way], tokens_per_update: int
) -> Iterator[str]:
    best = best_rates(outcomes)
    curves: list[tuple[Way, str, Curve, bool]] = []
    for way in ways:
        own, same = best[optimizer, way], shared_rate(best, optimizer, way)
        for rate in dict.fromkeys((own, same)):
            css = "curve" if rate == own else "curve same"
            found = over_seeds(outcomes, optimizer, way, rate)
            is_lost = any(outcome.has_diverged for outcome in found)
            curves.append((way, css, _smooth(found), is_lost))
    num_updates = len(outcomes[0].losses)
    low = min(loss for *_, curve, _ in curves for loss in curve) - 0.05
    end, high = num_updates * tokens_per_update / 1e3, low + HEADROOM

    def x(update: float) -> float:
        return WIDTH * update / num_updates

    def y(loss: float) -> float:
        return HEIGHT * (high - loss) / (high - low)

    m = ways[0].num_microbatches
    words = "micro-batch" if m == 1 else "micro-batches"
    yield f'<text class="panel" y="-8">{optimizer}, an update for {m} {words}</text>'
    yield from _axes(end, low, high)
    yield '<g clip-path="url(#panel)">'
    for way, css, curve, is_lost in curves:
        points = " ".join(f"{x(i + 1):.1f},{y(loss):.1f}" for i, loss in enumerate(curve))
        yield f'<polyline class="{css}" stroke="{COLOURS[way.name]}" points="{points}"/>'
        if is_lost:
            first = _lost(curve)
            at = x(first), min(max(y(curve[first - 1]), 8.0), HEIGHT - 8)
            yield f'<path class="end" stroke="{COLOURS[way.name]}" d="{_cross(*at)}"/>'
    yield "</g>"


def _axes(end: float, low: float, high: float) -> Iterator[str]:
    for thousands in axis_times(end, 6):
        x = WIDTH * thousands / end
        yield f'<path class="grid" d="M{x:.1f} 0V{HEIGHT:g}"/>'
        label = f"{thousands:g}" + (" thousand tokens" if not thousands else "")
        side = "" if not thousands else " middle"
        yield f'<text class="axis{side}" x="{x:.1f}" y="{HEIGHT + 16:g}">{label}</text>'
    for loss in (0.2 * i for i in range(math.ceil(low / 0.2), math.floor(high / 0.2) + 1)):
        y = HEIGHT * (high - loss) / (high - low)
        yield f'<path class="grid" d="M0 {y:.1f}H{WIDTH:g}"/>'
        yield f'<text class="axis right" x="-7" y="{y + 4:.1f}">{loss:.1f}</text>'
    yield f'<path class="frame" d="M0 0V{HEIGHT:g}H{WIDTH:g}"/>'


def _smooth(found: Sequence[Outcome]) -> Curve:
    """The mean over seeds, and over the last few updates; it ends where one is not finite."""
    means = [fmean(losses) for losses in zip(*(each.losses for each in found), strict=True)]
    length = max(1, int(SMOOTH * len(means)))
    curve = []
    for i in range(len(means)):
        mean = fmean(means[max(0, i + 1 - length) : i + 1])
        if not math.isfinite(mean):
            break
        curve.append(mean)
    return curve


def _lost(curve: Curve) -> int:
    """The update from which on it is worse than at the beginning, or at which it ends."""
    good = [i for i, loss in enumerate(curve) if loss <= curve[0]]
    return min(len(curve), good[-1] + 2)


def _cross(x: float, y: float) -> str:
    return f"M{x - 4:.1f} {y - 4:.1f}l8 8m0 -8l-8 8"
