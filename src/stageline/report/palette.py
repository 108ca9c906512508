"""Define the colours and names of actions, for text, SVG and HTML alike."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import cache

from stageline.report.timeline import Timeline
from stageline.schedules.action import Action, Kind
from stageline.schedules.placement import Placement

# Okabe and Ito's palette: distinct for every common form of colour blindness.
COLOURS = {Kind.F: "#0072B2", Kind.I: "#E69F00", Kind.W: "#009E73", Kind.B: "#D55E00"}
OTHER_COLOUR = "#999999"
BLACK, WHITE = "#000000", "#FFFFFF"
LIGHTEST = 0.6  # how far the last chunk of a rank is mixed with white

NAMES = {
    Kind.F: "forward",
    Kind.I: "input gradient",
    Kind.W: "weight gradient",
    Kind.B: "backward",
    Kind.REDUCE_GRAD: "gradient reduction",
    Kind.REDUCE_TIED: "sum over tied weights",
    Kind.UPDATE_STATS: "running statistics",
    Kind.CLIP_GRAD: "gradient clipping",
    Kind.STEP: "optimizer step",
    Kind.SEND_F: "send activation",
    Kind.RECV_F: "receive activation",
    Kind.SEND_B: "send gradient",
    Kind.RECV_B: "receive gradient",
}
LETTERS = {
    Kind.REDUCE_GRAD: "R",
    Kind.REDUCE_TIED: "T",
    Kind.UPDATE_STATS: "N",
    Kind.CLIP_GRAD: "C",
    Kind.STEP: "S",
    Kind.SEND_F: ">",
    Kind.RECV_F: "<",
    Kind.SEND_B: ">",
    Kind.RECV_B: "<",
}

Paint = Callable[[Action], str]
Rgb = tuple[float, float, float]
LUMINANCE: Rgb = (0.2126, 0.7152, 0.0722)  # of linear red, green and blue


def letter(kind: Kind) -> str:
    """Return the letter of a kind."""
    return LETTERS.get(kind, kind.value)


def kinds(timeline: Timeline) -> tuple[Kind, ...]:
    """Return the kinds of action in a timeline, in the order of `Kind`."""
    seen = {span.action.kind for row in timeline.spans for span in row}
    return tuple(kind for kind in Kind if kind in seen)


def lasting_kinds(timeline: Timeline) -> tuple[Kind, ...]:
    """Return the kinds that take time in a timeline; a stream's steps may take none."""
    lasting = {s.action.kind for row in timeline.spans for s in row if s.end > s.start}
    return tuple(kind for kind in Kind if kind in lasting)


def chunks(placement: Placement) -> tuple[int, ...]:
    """Return, for each stage, how many earlier stages its rank holds.

    >>> chunks((0, 1, 1, 0))
    (0, 0, 1, 1)
    """
    return tuple(placement[:stage].count(rank) for stage, rank in enumerate(placement))


def num_chunks(placement: Placement) -> int:
    """Return the largest number of stages on a rank."""
    return 1 + max(chunks(placement), default=0)


def painter(timeline: Timeline) -> Paint:
    """Return a function that gives each action of a timeline its colour."""
    chunk_of = chunks(timeline.placement)
    total = num_chunks(timeline.placement)
    shade_of = cache(lambda kind, stage: shade(kind, chunk_of[stage], total))
    return lambda action: shade_of(action.kind, action.stage)


def shade(kind: Kind, chunk: int, total: int) -> str:
    """Return the colour of a chunk: dark for the first of a rank, light for the last."""
    lightness = LIGHTEST * chunk / (total - 1) if total > 1 else 0.0
    return mix([(COLOURS.get(kind, OTHER_COLOUR), 1.0 - lightness), (WHITE, lightness)])


def mix(parts: list[tuple[str, float]]) -> str:
    """Return the weighted average of colours."""
    total = sum(weight for _, weight in parts)
    sums = [sum(_rgb(colour)[i] * weight for colour, weight in parts) for i in range(3)]
    return "#" + "".join(f"{round(channel / total):02X}" for channel in sums)


def ink(background: str) -> str:
    """Return black or white, whichever has more contrast on a background, as WCAG defines it."""
    luminance = sum(map(operator.mul, LUMINANCE, map(_linear, _rgb(background))))
    return BLACK if (luminance + 0.05) ** 2 > 1.05 * 0.05 else WHITE


def _linear(channel: float) -> float:
    share = channel / 255
    return share / 12.92 if share <= 0.04045 else float(((share + 0.055) / 1.055) ** 2.4)


def _rgb(colour: str) -> Rgb:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)
