"""The text grid in colour, within the terminal: two cells to a character where there are many."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from rich.text import Text

from stageline.report import palette
from stageline.report.summary import number
from stageline.report.text.grid import (
    Layout,
    cell_notes,
    compact_layout,
    labelled_layout,
    measure_lines,
    microbatch_name,
    row_name,
    shown_actions,
)
from stageline.report.timeline import Timeline
from stageline.schedules.action import Action

DIM = "dim"
CELLS_PER_COLUMN = 2  # ▌ has one colour on the left and another on the right
NUM_FOOTER_LINES = 4

Row = Sequence[Action | None]


def coloured(
    timeline: Timeline, width: int, height: int | None = None, end: float | None = None
) -> Text:
    """The grid within `width` columns and, if given, `height` lines: the middle ranks may go.

    With `end`, the time at the right edge, several timelines have one scale.
    """
    paint = palette.painter(timeline)
    layout = None if end else labelled_layout(timeline, width, [microbatch_name])
    if layout:
        rows = [_labels(row, layout, paint) for row in shown_actions(timeline, layout)]
        notes = cell_notes(timeline, layout)
    else:
        layout = compact_layout(timeline, width, CELLS_PER_COLUMN, end)
        rows = [_half_blocks(row, paint) for row in shown_actions(timeline, layout)]
        notes = [f"a column is {number(CELLS_PER_COLUMN * layout.quantum)}"]
    grid = [Text.assemble((row_name(timeline, i), DIM), row) for i, row in enumerate(rows)]
    footer = [_legend(timeline, notes), *map(Text, measure_lines(timeline, width))]
    lines = [*_without_middle(grid, height), *footer]
    for line in lines:  # Console.print would wrap them: it does not heed a Text's no_wrap
        line.truncate(width, overflow="ellipsis")
    return Text("\n").join(lines)


def _labels(row: Row, layout: Layout, paint: palette.Paint) -> Text:
    """An action's label stands where it starts; its colour goes on to where it ends."""
    text = Text()
    for before, action in zip([None, *row], row, strict=False):
        label = layout.label(action)
        if action is None:
            text.append(label + layout.gap, DIM)
        else:
            shown = label if action != before else " " * layout.label_width
            text.append(shown + layout.gap, f"{palette.ink(paint(action))} on {paint(action)}")
    return text


def _half_blocks(row: Row, paint: palette.Paint) -> Text:
    text = Text()
    for left, right in zip_longest(row[::2], row[1::2]):
        text.append(*_half_block(left and paint(left), right and paint(right)))
    return text


def _half_block(left: str | None, right: str | None) -> tuple[str, str]:
    """A character and its style. Idle halves keep the terminal's own background, dark or light."""
    if left == right:
        return ("█", left) if left else ("·", DIM)
    if left is None:
        return "▐", str(right)
    return "▌", f"{left} on {right}" if right else left


def _legend(timeline: Timeline, notes: list[str]) -> Text:
    num_chunks = palette.num_chunks(timeline.placement)
    text = Text()
    for kind in palette.lasting_kinds(timeline):
        for chunk in range(num_chunks):
            colour = palette.shade(kind, chunk, num_chunks)
            text.append(f"{palette.letter(kind):^3}", f"{palette.ink(colour)} on {colour}")
        text.append(f" {palette.NAMES[kind]}   ")
    return text.append("   ".join(["· idle", *notes]), DIM)


def _without_middle(rows: list[Text], height: int | None) -> list[Text]:
    room = len(rows) if height is None else max(height - NUM_FOOTER_LINES, 3)
    if len(rows) <= room:
        return rows
    top, bottom = room // 2, (room - 1) // 2
    left_out = Text(f"  ⋮ {len(rows) - top - bottom} more ranks", DIM)
    return [*rows[:top], left_out, *rows[-bottom:]]
