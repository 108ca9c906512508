"""A timeline as an SVG picture: a lane for each rank, its memory beneath, and time to the right."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import zip_longest
from typing import NamedTuple

from stageline.report import palette
from stageline.report.spans import Level, Span
from stageline.report.summary import measures, number, sizes
from stageline.report.svg.frame import BOTTOM, CAPITAL, LEFT, TOP, Frame, frame_of
from stageline.report.svg.frame import ticks as round_times
from stageline.report.svg.lanes import (
    labels,
    memory_curve,
    outlines,
    px,
    rectangles,
    tick_outlines,
    ticks,
    versions,
)
from stageline.report.timeline import Timeline
from stageline.schedules.action import Kind

MAX_TOOLTIPS = 4000  # with more actions than this a lane is a few paths
LETTER = 5.7  # the width of one in the legend
SWATCH, TICK = 14, 2
LEGIBLE = 5.5  # a font size

STYLE = """
text{font-family:"Helvetica Neue",Helvetica,Arial,sans-serif;fill:#222}
.title{font-size:17px;font-weight:600}.light{font-weight:400;fill:#666}
.small{font-size:12px;fill:#444}.axis{font-size:11px;fill:#666;text-anchor:middle}
.rank{text-anchor:end}.peak{fill:#8A4472}.labels text{text-anchor:middle}.labels .white{fill:#FFF}
.versions text{text-anchor:end}.versions .white{fill:#FFF}.tick,.ticks{fill:#111}
.idle{fill:#EFEFEF}.grid{stroke:#DDD;fill:none}
.held{fill:#CC79A7;fill-opacity:.28;stroke:#A6578A;stroke-width:.8}
.grid,.held{vector-effect:non-scaling-stroke}.top{fill:#8A4472}
"""


def svg(timeline: Timeline, min_font: float = LEGIBLE) -> str:
    """The picture; micro-batches are numbered unless that takes a font below `min_font`."""
    return stacked([timeline], min_font)


def stacked(timelines: Sequence[Timeline], min_font: float = LEGIBLE) -> str:
    """Timelines of one schedule in one picture, one over the other, on one scale of time."""
    longest = max(timelines, key=lambda timeline: timeline.makespan)
    frame = frame_of(longest, min_font)
    size = (frame.width, len(timelines) * frame.height)
    return document(longest, frame, size, _stack(timelines, frame, longest.makespan))


def document(
    timeline: Timeline, frame: Frame, size: tuple[float, float], elements: Iterable[str]
) -> str:
    """A whole picture, with the colours of all that is in the timeline."""
    width, height = map(px, size)
    extent = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="stageline" {extent} role="img">',
        f"<style>{STYLE}{_shades(timeline)}{_sizes(frame)}</style>",
        '<rect width="100%" height="100%" fill="#FFF"/>',
    ]
    return "\n".join([*lines, *elements, "</svg>"]) + "\n"


def _stack(timelines: Iterable[Timeline], frame: Frame, end: float) -> Iterator[str]:
    for place, timeline in enumerate(timelines):
        shift = f"0 {px(place * frame.height)}" if place else ""
        yield from group("timeline", shift, _picture(timeline, frame, end))


def _picture(timeline: Timeline, frame: Frame, end: float) -> Iterator[str]:
    yield from header(timeline.name or "timeline", sizes(timeline), " · ".join(measures(timeline)))
    yield from legend(timeline, frame)
    if frame.memory:
        x, y = px(LEFT + frame.lanes_width + 10), px(TOP - 8)
        yield f'<text class="peak" x="{x}" y="{y}">peak</text>'
    yield from axis(end, frame)
    lanes = [
        Lane(f"rank {rank}", TOP + rank * frame.pitch, row, timeline.makespan, memory)
        for rank, (row, memory) in enumerate(zip_longest(timeline.spans, timeline.memory))
    ]
    yield from drawn(lanes, timeline, frame)


def xml(text: str) -> str:
    """Safe between tags and in attributes; control characters have no place in XML at all."""
    return escape("".join(character for character in text if character.isprintable()))


def _shades(timeline: Timeline) -> str:
    total = palette.num_chunks(timeline.placement)
    return "".join(
        f".{kind.value}{chunk}{{fill:{palette.shade(kind, chunk, total)}}}"
        for kind in palette.kinds(timeline)
        for chunk in range(total)
    )


def _sizes(frame: Frame) -> str:
    return (
        f"\n.labels{{font-size:{px(frame.font)}px}}.versions{{font-size:{px(frame.small_font)}px}}"
        f".actions{{stroke:#FFF;stroke-width:{px(frame.edge)}}}"
        f".rank,.peak{{font-size:{px(min(12.0, 0.7 * frame.pitch))}px}}"
    )


def header(name: str, extent: str, words: str) -> Iterator[str]:
    x = px(LEFT)
    yield (
        f'<text class="title" x="{x}" y="28">{xml(name)}'
        f'<tspan class="light" dx="12">{extent}</tspan></text>'
    )
    yield f'<text class="small" x="{x}" y="49">{xml(words)}</text>'


def legend(timeline: Timeline, frame: Frame) -> Iterator[str]:
    x = LEFT
    for classes, name in _legend_entries(timeline, frame):
        for css in classes:
            width = TICK if css == "tick" else SWATCH
            yield f'<rect class="{css}" x="{px(x)}" y="61" width="{width}" height="12"/>'
            x += width
        yield f'<text class="small" x="{px(x + 6)}" y="71">{name}</text>'
        x += 6 + LETTER * len(name) + 20


def _legend_entries(timeline: Timeline, frame: Frame) -> Iterator[tuple[list[str], str]]:
    total = palette.num_chunks(timeline.placement)
    for kind in palette.kinds(timeline):
        is_tick = kind is Kind.STEP and kind not in palette.lasting_kinds(timeline)
        shades = ["tick"] if is_tick else [f"{kind.value}{chunk}" for chunk in range(total)]
        yield shades, palette.NAMES[kind]
    if total > 1:
        yield [], "(light: later chunks of a rank)"
    if timeline.schedule.is_stream and frame.is_labelled:
        yield [], "(small: version of the weights)"
    yield ["idle"], "idle"
    if any(timeline.memory):
        yield ["held"], "memory held"


def axis(end: float, frame: Frame) -> Iterator[str]:
    bottom, times = frame.height - BOTTOM, round_times(end)
    lines = "".join(f"M{px(LEFT + frame.x(time))} {px(TOP)}V{px(bottom + 4)}" for time in times)
    yield f'<path class="grid" d="{lines}"/>'
    for time in times:
        x = px(LEFT + frame.x(time))
        yield f'<text class="axis" x="{x}" y="{px(bottom + 17)}">{number(time)}</text>'
    middle = px(LEFT + frame.lanes_width / 2)
    yield f'<text class="axis" x="{middle}" y="{px(bottom + 33)}">time</text>'


class Lane(NamedTuple):
    """One row of actions, as far from the top; it is grey up to its end, where nothing ran."""

    name: str
    top: float
    spans: Sequence[Span]
    end: float
    memory: Sequence[Level] | None = None


def drawn(lanes: Iterable[Lane], timeline: Timeline, frame: Frame) -> Iterator[str]:
    """Lanes of a timeline, which says what their colours are."""
    chunk_of, paint = palette.chunks(timeline.placement), palette.painter(timeline)
    has_tooltips = sum(map(len, timeline.spans)) <= MAX_TOOLTIPS
    draw, mark = (rectangles, ticks) if has_tooltips else (outlines, tick_outlines)
    middle, baseline = px(frame.lane / 2), px(frame.lane / 2 + 0.35 * frame.font)
    corner = px(frame.margin + CAPITAL * frame.small_font)
    for name, top, row, end, memory in lanes:
        yield f'<g class="lane" transform="translate({px(LEFT)} {px(top)})">'
        yield f'<text class="rank" x="-10" y="{middle}" dy=".35em">{name}</text>'
        width = px(frame.x(end) or frame.lanes_width)
        yield f'<rect class="idle" width="{width}" height="{px(frame.lane)}"/>'
        yield from group("actions", "", draw(row, chunk_of, frame))
        yield from group("labels", f"0 {baseline}", labels(row, frame, paint))
        if timeline.schedule.is_stream:
            yield from group("versions", f"0 {corner}", versions(row, frame, paint))
            yield from group("ticks", "", mark(row, frame))
        if frame.memory and memory:
            curve = memory_curve(memory, end, frame)
            yield from group("memory", f"0 {px(frame.memory_top)}", curve)
        yield "</g>"


def group(css: str, shift: str, elements: Iterable[str]) -> Iterator[str]:
    transform = f' transform="translate({shift})"' if shift else ""
    yield f'<g class="{css}"{transform}>'
    yield from elements
    yield "</g>"
