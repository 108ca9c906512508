"""Draw a timeline as SVG: one lane per rank with its memory below, time from left to right."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import zip_longest
from typing import NamedTuple

from stageline.report import palette
from stageline.report.spans import MemoryLevel, Span
from stageline.report.summary import measure_phrases, number, sizes
from stageline.report.svg.geometry import (
    BOTTOM,
    CAPITAL,
    LEFT,
    TOP,
    Geometry,
    axis_times,
    geometry_of,
)
from stageline.report.svg.lane_elements import (
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

MAX_TOOLTIPS = 4000  # with more actions, a lane is drawn as a few paths without tooltips
LETTER = 5.7  # average width of a letter in the legend
SWATCH, TICK = 14, 2
LEGIBLE = 5.5  # font size in pixels

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
    """Return the picture; micro-batches are labelled unless the font would be below `min_font`."""
    return stacked([timeline], min_font)


def stacked(timelines: Sequence[Timeline], min_font: float = LEGIBLE) -> str:
    """Return one picture of several timelines of a schedule, stacked on one time scale."""
    longest = max(timelines, key=lambda timeline: timeline.makespan)
    geometry = geometry_of(longest, min_font)
    size = (geometry.width, len(timelines) * geometry.height)
    return document(longest, geometry, size, _stack(timelines, geometry, longest.makespan))


def document(
    timeline: Timeline, geometry: Geometry, size: tuple[float, float], elements: Iterable[str]
) -> str:
    """Return an SVG document of elements, with the colours of the timeline's actions."""
    width, height = map(px, size)
    extent = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="stageline" {extent} role="img">',
        f"<style>{STYLE}{_shades(timeline)}{_sizes(geometry)}</style>",
        '<rect width="100%" height="100%" fill="#FFF"/>',
    ]
    return "\n".join([*lines, *elements, "</svg>"]) + "\n"


def _stack(timelines: Iterable[Timeline], geometry: Geometry, end: float) -> Iterator[str]:
    for place, timeline in enumerate(timelines):
        shift = f"0 {px(place * geometry.height)}" if place else ""
        yield from group("timeline", shift, _picture(timeline, geometry, end))


def _picture(timeline: Timeline, geometry: Geometry, end: float) -> Iterator[str]:
    yield from header(
        timeline.name or "timeline", sizes(timeline), " · ".join(measure_phrases(timeline))
    )
    yield from legend(timeline, geometry)
    if geometry.memory:
        x, y = px(LEFT + geometry.lanes_width + 10), px(TOP - 8)
        yield f'<text class="peak" x="{x}" y="{y}">peak</text>'
    yield from axis(end, geometry)
    lanes = [
        Lane(f"rank {rank}", TOP + rank * geometry.pitch, row, timeline.makespan, memory)
        for rank, (row, memory) in enumerate(zip_longest(timeline.spans, timeline.memory))
    ]
    yield from draw_lanes(lanes, timeline, geometry)


def xml(text: str) -> str:
    """Return text escaped for XML, without control characters, which XML does not allow."""
    return escape("".join(character for character in text if character.isprintable()))


def _shades(timeline: Timeline) -> str:
    total = palette.num_chunks(timeline.placement)
    return "".join(
        f".{kind.value}{chunk}{{fill:{palette.shade(kind, chunk, total)}}}"
        for kind in palette.kinds(timeline)
        for chunk in range(total)
    )


def _sizes(geometry: Geometry) -> str:
    return (
        f"\n.labels{{font-size:{px(geometry.font)}px}}.versions{{font-size:{px(geometry.small_font)}px}}"
        f".actions{{stroke:#FFF;stroke-width:{px(geometry.edge)}}}"
        f".rank,.peak{{font-size:{px(min(12.0, 0.7 * geometry.pitch))}px}}"
    )


def header(name: str, extent: str, words: str) -> Iterator[str]:
    """Yield the title of a picture and the line below it."""
    x = px(LEFT)
    yield (
        f'<text class="title" x="{x}" y="28">{xml(name)}'
        f'<tspan class="light" dx="12">{extent}</tspan></text>'
    )
    yield f'<text class="small" x="{x}" y="49">{xml(words)}</text>'


def legend(timeline: Timeline, geometry: Geometry) -> Iterator[str]:
    """Yield the legend of the colours."""
    x = LEFT
    for classes, name in _legend_entries(timeline, geometry):
        for css in classes:
            width = TICK if css == "tick" else SWATCH
            yield f'<rect class="{css}" x="{px(x)}" y="61" width="{width}" height="12"/>'
            x += width
        yield f'<text class="small" x="{px(x + 6)}" y="71">{name}</text>'
        x += 6 + LETTER * len(name) + 20


def _legend_entries(timeline: Timeline, geometry: Geometry) -> Iterator[tuple[list[str], str]]:
    total = palette.num_chunks(timeline.placement)
    for kind in palette.kinds(timeline):
        is_tick = kind is Kind.STEP and kind not in palette.lasting_kinds(timeline)
        shades = ["tick"] if is_tick else [f"{kind.value}{chunk}" for chunk in range(total)]
        yield shades, palette.NAMES[kind]
    if total > 1:
        yield [], "(light: later chunks of a rank)"
    if timeline.schedule.is_stream and geometry.is_labelled:
        yield [], "(small: version of the weights)"
    yield ["idle"], "idle"
    if any(timeline.memory):
        yield ["held"], "memory held"


def axis(end: float, geometry: Geometry) -> Iterator[str]:
    """Yield the time axis and its grid lines."""
    bottom, times = geometry.height - BOTTOM, axis_times(end)
    lines = "".join(f"M{px(LEFT + geometry.x(time))} {px(TOP)}V{px(bottom + 4)}" for time in times)
    yield f'<path class="grid" d="{lines}"/>'
    for time in times:
        x = px(LEFT + geometry.x(time))
        yield f'<text class="axis" x="{x}" y="{px(bottom + 17)}">{number(time)}</text>'
    middle = px(LEFT + geometry.lanes_width / 2)
    yield f'<text class="axis" x="{middle}" y="{px(bottom + 33)}">time</text>'


class Lane(NamedTuple):
    """One row of actions at a distance from the top; idle time up to `end` is grey."""

    name: str
    top: float
    spans: Sequence[Span]
    end: float
    memory: Sequence[MemoryLevel] | None = None


def draw_lanes(
    lanes: Iterable[Lane],
    timeline: Timeline,
    geometry: Geometry,
    max_tooltips: int = MAX_TOOLTIPS,
) -> Iterator[str]:
    """Yield the elements of lanes, in the colours of a timeline."""
    chunk_of, paint = palette.chunks(timeline.placement), palette.painter(timeline)
    has_tooltips = sum(map(len, timeline.spans)) <= max_tooltips
    draw, mark = (rectangles, ticks) if has_tooltips else (outlines, tick_outlines)
    middle, baseline = px(geometry.lane / 2), px(geometry.lane / 2 + 0.35 * geometry.font)
    corner = px(geometry.margin + CAPITAL * geometry.small_font)
    for name, top, row, end, memory in lanes:
        yield f'<g class="lane" transform="translate({px(LEFT)} {px(top)})">'
        yield f'<text class="rank" x="-10" y="{middle}" dy=".35em">{name}</text>'
        width = px(geometry.x(end) or geometry.lanes_width)
        yield f'<rect class="idle" width="{width}" height="{px(geometry.lane)}"/>'
        yield from group("actions", "", draw(row, chunk_of, geometry))
        yield from group("labels", f"0 {baseline}", labels(row, geometry, paint))
        if timeline.schedule.is_stream:
            yield from group("versions", f"0 {corner}", versions(row, geometry, paint))
            yield from group("ticks", "", mark(row, geometry))
        if geometry.memory and memory:
            curve = memory_curve(memory, end, geometry)
            yield from group("memory", f"0 {px(geometry.memory_top)}", curve)
        yield "</g>"


def group(css: str, shift: str, elements: Iterable[str]) -> Iterator[str]:
    """Yield elements in a group with a CSS class, moved by `shift`."""
    transform = f' transform="translate({shift})"' if shift else ""
    yield f'<g class="{css}"{transform}>'
    yield from elements
    yield "</g>"
