"""Draw a large timeline coarsely in SVG: each rank as cells of equal time, without memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, groupby

from stageline.report.spans import Span
from stageline.report.summary import measure_phrases, number, sizes
from stageline.report.svg.drawing import Lane, axis, document, draw_lanes, group, header, legend
from stageline.report.svg.geometry import TOP, geometry_of
from stageline.report.text.time_cells import cells, dithered
from stageline.report.timeline import Timeline

NUM_CELLS = 200  # of each rank; more are narrower than what can be told apart
MOST_LANES = 64  # with as many, a picture has 300 KB at worst


def coarse_svg(timeline: Timeline) -> str:
    """Return a picture of some 100 KB, however many actions and ranks there are."""
    quantum = (timeline.makespan or 1.0) / NUM_CELLS
    rows = tuple(tuple(_merged(row, quantum)) for row in timeline.spans[:MOST_LANES])
    shown = Timeline(rows, timeline.placement, name=timeline.name)
    geometry = geometry_of(shown, min_font=0.0)
    lanes = [
        Lane(f"rank {rank}", TOP + rank * geometry.pitch, row, timeline.makespan)
        for rank, row in enumerate(shown.spans)
    ]
    words = " · ".join([*measure_phrases(timeline), left_out(timeline)])
    parts = (
        header(timeline.name or "timeline", sizes(timeline), words),
        legend(shown, geometry),
        axis(timeline.makespan, geometry),
        draw_lanes(lanes, shown, geometry, max_tooltips=0),
    )
    picture = group("timeline", "", chain.from_iterable(parts))
    return document(shown, geometry, (geometry.width, geometry.height), picture)


def left_out(timeline: Timeline) -> str:
    """Return what a coarse picture does not show."""
    actions = sum(map(len, timeline.spans))
    text = (
        f"drawn coarsely: {actions:,} actions in cells of {number(timeline.makespan / NUM_CELLS)}"
    )
    if timeline.num_ranks > MOST_LANES:
        text += f", {timeline.num_ranks - MOST_LANES:,} further ranks are left out"
    return text


def _merged(row: Sequence[Span], quantum: float) -> Iterator[Span]:
    """Yield a span for each run of cells that show the same."""
    numbered = enumerate(dithered(cells(row, quantum, NUM_CELLS)))
    for action, run in groupby(numbered, key=lambda cell: cell[1]):
        positions = [position for position, _ in run]
        if action is not None:
            yield Span(action, positions[0] * quantum, (positions[-1] + 1) * quantum)
