"""Draw one rank's lane in SVG: its actions, their labels, and its memory curve."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from stageline.report import palette
from stageline.report.memory import memory_steps
from stageline.report.spans import MemoryLevel, Span
from stageline.report.summary import number
from stageline.report.svg.geometry import Geometry
from stageline.schedules.action import NO_VERSION, WHOLE_BATCH, Action, Kind


def px(pixels: float) -> str:
    """Return a length with at most two decimals."""
    return f"{pixels:.2f}".rstrip("0").rstrip(".")


def css_class(action: Action, chunk_of: Sequence[int]) -> str:
    """Return the CSS class of an action's colour."""
    return f"{action.kind.value}{chunk_of[action.stage]}"


def rectangles(row: Sequence[Span], chunk_of: Sequence[int], geometry: Geometry) -> Iterator[str]:
    """Yield an element for each action, with a tooltip."""
    for span in row:
        if is_tick(span):
            continue
        x, width = px(geometry.x(span.start)), px(geometry.x(span.end - span.start))
        yield (
            f'<rect class="{css_class(span.action, chunk_of)}" x="{x}" width="{width}" '
            f'height="{px(geometry.lane)}"><title>{_tooltip(span)}</title></rect>'
        )


def is_tick(span: Span) -> bool:
    """Return whether a span is an optimizer step without duration, drawn as a mark."""
    return span.action.kind is Kind.STEP and span.start == span.end


def ticks(row: Sequence[Span], geometry: Geometry) -> Iterator[str]:
    """Yield marks of steps, which rise above the lane to be visible between actions."""
    for span in filter(is_tick, row):
        yield f'<path d="{_tick(span, geometry)}"><title>{_tooltip(span)}</title></path>'


def tick_outlines(row: Sequence[Span], geometry: Geometry) -> Iterator[str]:
    """Yield one path for all marks of steps."""
    yield f'<path d="{"".join(_tick(span, geometry) for span in filter(is_tick, row))}"/>'


def _tick(span: Span, geometry: Geometry) -> str:
    x, rise, width = (
        geometry.x(span.start) - geometry.tick / 2,
        2.5 * geometry.tick,
        px(geometry.tick),
    )
    return f"M{px(x)} {px(-rise)}h{width}v{px(geometry.lane + rise)}h-{width}z"


def outlines(row: Sequence[Span], chunk_of: Sequence[int], geometry: Geometry) -> Iterator[str]:
    """Yield one path for all actions of a kind, which takes an eighth of the bytes."""
    paths: dict[str, list[str]] = defaultdict(list)
    for action, start, end in row:
        if is_tick(Span(action, start, end)):
            continue
        width = px(geometry.x(end - start))
        outline = f"M{px(geometry.x(start))} 0h{width}v{px(geometry.lane)}h-{width}z"
        paths[css_class(action, chunk_of)].append(outline)
    for css, parts in paths.items():
        yield f'<path class="{css}" d="{"".join(parts)}"/>'


def labels(row: Sequence[Span], geometry: Geometry, paint: palette.Paint) -> Iterator[str]:
    """Yield the numbers of micro-batches, in the actions that are wide enough."""
    for action, start, end in row:
        label = str(action.microbatch)
        if action.microbatch != WHOLE_BATCH and geometry.fits(label, end - start):
            css = 'class="white" ' if palette.ink(paint(action)) == palette.WHITE else ""
            yield f'<text {css}x="{px(geometry.x((start + end) / 2))}">{label}</text>'


def versions(row: Sequence[Span], geometry: Geometry, paint: palette.Paint) -> Iterator[str]:
    """Yield weight versions, in the upper right corner of actions that are large enough."""
    for action, start, end in row:
        label, is_named = str(action.version), action.microbatch != WHOLE_BATCH
        if is_named and action.version != NO_VERSION and geometry.fits_small(label, end - start):
            css = 'class="white" ' if palette.ink(paint(action)) == palette.WHITE else ""
            yield f'<text {css}x="{px(geometry.x(end) - geometry.margin)}">{label}</text>'


def memory_curve(
    levels: Sequence[MemoryLevel], makespan: float, geometry: Geometry
) -> Iterator[str]:
    """Yield the memory curve as an area, with its peak marked, and written at the right."""
    path = "".join(
        f"H{px(geometry.x(time))}V{px(geometry.y(held))}"
        for time, held in memory_steps(levels).items()
    )
    floor, end = px(geometry.memory), px(geometry.x(makespan))
    yield f'<path class="held" d="M0 {floor}{path}H{end}V{floor}z"/>'
    peak = max(levels, key=lambda level: level.total)
    x, y = px(geometry.x(peak.time)), px(geometry.y(peak.total))
    yield f'<circle class="top" cx="{x}" cy="{y}" r="{px(geometry.dot)}"/>'
    x, y = px(geometry.lanes_width + 10), px(geometry.memory / 2)
    yield f'<text class="peak" x="{x}" y="{y}" dy=".35em">{number(peak.total)}</text>'


def _tooltip(span: Span) -> str:
    action, start, end = span
    part = "" if action.microbatch == WHOLE_BATCH else f" of micro-batch {action.microbatch}"
    name = f"{palette.NAMES[action.kind]}{part} on stage {action.stage}{_weights(action)}"
    return f"{action}: {name}, {number(start)} to {number(end)}"


def _weights(action: Action) -> str:
    if action.version == NO_VERSION:
        return ""
    return f" {'makes' if action.kind is Kind.STEP else 'with'} weights {action.version}"
