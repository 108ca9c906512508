"""What the SVG shows of one rank: its actions, their micro-batches, and the memory beneath."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from stageline.report import palette
from stageline.report.measures.steps import steps
from stageline.report.spans import Level, Span
from stageline.report.summary import number
from stageline.report.svg.frame import Frame
from stageline.schedules.action import NO_VERSION, WHOLE_BATCH, Action, Kind


def px(pixels: float) -> str:
    """A hundredth of a pixel is enough, and many need no more than whole ones."""
    return f"{pixels:.2f}".rstrip("0").rstrip(".")


def css_class(action: Action, chunk_of: Sequence[int]) -> str:
    return f"{action.kind.value}{chunk_of[action.stage]}"


def rectangles(row: Sequence[Span], chunk_of: Sequence[int], frame: Frame) -> Iterator[str]:
    """An element for each action, which tells what it is when the mouse rests on it."""
    for span in row:
        if is_tick(span):
            continue
        x, width = px(frame.x(span.start)), px(frame.x(span.end - span.start))
        yield (
            f'<rect class="{css_class(span.action, chunk_of)}" x="{x}" width="{width}" '
            f'height="{px(frame.lane)}"><title>{_tooltip(span)}</title></rect>'
        )


def is_tick(span: Span) -> bool:
    """A step that takes no time: a mark between two actions."""
    return span.action.kind is Kind.STEP and span.start == span.end


def ticks(row: Sequence[Span], frame: Frame) -> Iterator[str]:
    """They rise above the lane, to be seen between actions of any colour."""
    for span in filter(is_tick, row):
        yield f'<path d="{_tick(span, frame)}"><title>{_tooltip(span)}</title></path>'


def tick_outlines(row: Sequence[Span], frame: Frame) -> Iterator[str]:
    """One path for all of them."""
    yield f'<path d="{"".join(_tick(span, frame) for span in filter(is_tick, row))}"/>'


def _tick(span: Span, frame: Frame) -> str:
    x, rise, width = frame.x(span.start) - frame.tick / 2, 2.5 * frame.tick, px(frame.tick)
    return f"M{px(x)} {px(-rise)}h{width}v{px(frame.lane + rise)}h-{width}z"


def outlines(row: Sequence[Span], chunk_of: Sequence[int], frame: Frame) -> Iterator[str]:
    """One path for all actions of a kind: an eighth of the bytes."""
    paths: dict[str, list[str]] = defaultdict(list)
    for action, start, end in row:
        if is_tick(Span(action, start, end)):
            continue
        width = px(frame.x(end - start))
        outline = f"M{px(frame.x(start))} 0h{width}v{px(frame.lane)}h-{width}z"
        paths[css_class(action, chunk_of)].append(outline)
    for css, parts in paths.items():
        yield f'<path class="{css}" d="{"".join(parts)}"/>'


def labels(row: Sequence[Span], frame: Frame, paint: palette.Paint) -> Iterator[str]:
    """The numbers of the micro-batches, in the actions that are wide enough for them."""
    for action, start, end in row:
        label = str(action.microbatch)
        if action.microbatch != WHOLE_BATCH and frame.fits(label, end - start):
            css = 'class="white" ' if palette.ink(paint(action)) == palette.WHITE else ""
            yield f'<text {css}x="{px(frame.x((start + end) / 2))}">{label}</text>'


def versions(row: Sequence[Span], frame: Frame, paint: palette.Paint) -> Iterator[str]:
    """The versions of the weights, at the upper right of the actions that have room for them."""
    for action, start, end in row:
        label, is_named = str(action.version), action.microbatch != WHOLE_BATCH
        if is_named and action.version != NO_VERSION and frame.fits_small(label, end - start):
            css = 'class="white" ' if palette.ink(paint(action)) == palette.WHITE else ""
            yield f'<text {css}x="{px(frame.x(end) - frame.margin)}">{label}</text>'


def memory_curve(levels: Sequence[Level], makespan: float, frame: Frame) -> Iterator[str]:
    """An area under steps, its peak marked and told at the right."""
    path = "".join(
        f"H{px(frame.x(time))}V{px(frame.y(held))}" for time, held in steps(levels).items()
    )
    floor, end = px(frame.memory), px(frame.x(makespan))
    yield f'<path class="held" d="M0 {floor}{path}H{end}V{floor}z"/>'
    peak = max(levels, key=lambda level: level.total)
    x, y = px(frame.x(peak.time)), px(frame.y(peak.total))
    yield f'<circle class="top" cx="{x}" cy="{y}" r="{px(frame.dot)}"/>'
    x, y = px(frame.lanes_width + 10), px(frame.memory / 2)
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
