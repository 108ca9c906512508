"""Draw the text grid in colour, for a terminal; a character shows two cells if there are many."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from rich.text import Text

from stageline.report import palette
from stageline.report.summary import number
from stageline.report.text.grid import (
    GridLayout,
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
    """Return the grid in `width` columns and, if given, `height` lines, without middle ranks.

    `end` is the time at the right edge, to draw several timelines on one scale.
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
    for line in lines:  # Console.print ignores a Text's no_wrap, and would wrap them
        line.truncate(width, overflow="ellipsis")
    return Text("\n").join(lines)


def _labels(row: Row, layout: GridLayout, paint: palette.Paint) -> Text:
    """Return a row with each label at the start of its action, and the colour up to its end."""
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
    """Return a character and its style; idle halves keep the terminal's background."""
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
    num_lines = len(rows) if height is None else max(height - NUM_FOOTER_LINES, 3)
    if len(rows) <= num_lines:
        return rows
    top, bottom = num_lines // 2, (num_lines - 1) // 2
    left_out = Text(f"  ⋮ {len(rows) - top - bottom} more ranks", DIM)
    return [*rows[:top], left_out, *rows[-bottom:]]
