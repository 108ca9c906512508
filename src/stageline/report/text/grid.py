"""A timeline as lines of text: a row for each rank, a cell for each slot of time.

    rank 0 │ F0 F1 .. .. B0 B0 .. B1 B1
    rank 1 │ .. F0 B0 B0 F1 B1 B1
    F forward · B backward · . idle · a cell is 1
    2 ranks, 2 micro-batches · makespan 9 · step bubble 33.3 % · …

Where that is wider than the terminal a cell is one letter, and each kind has its share of them.

A stream's actions name the version of the weights that they use by a small number: `F4²`.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from stageline.report import palette
from stageline.report.measures.idle import table
from stageline.report.summary import heading, measures, number
from stageline.report.text.cells import (
    cells,
    dithered,
    exact_quantum,
    hides_actions,
    main_actions,
    num_cells,
    rough_quantum,
)
from stageline.report.timeline import Timeline
from stageline.schedules.action import NO_VERSION, WHOLE_BATCH, Action, Kind

SEPARATOR = " · "
SUPERSCRIPT = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
Naming = Callable[[Action], str]


class Layout(NamedTuple):
    """How a picture is cut: the time of a cell, and the characters that it takes."""

    quantum: float
    name: Naming
    label_width: int = 1
    gap: str = ""  # between cells
    shows_versions: bool = False

    def label(self, action: Action | None) -> str:
        return self.name(action).ljust(self.label_width) if action else "." * self.label_width


def plain(timeline: Timeline, width: int | None = None, end: float | None = None) -> str:
    """The grid in letters, at most `width` columns wide; as wide as it takes if None.

    With `end`, the time at the right edge, several timelines have one scale.
    """
    layout = None if end else labelled_layout(timeline, width)
    layout = layout or compact_layout(timeline, width or 0, end=end)
    rows = (
        row_name(timeline, rank) + layout.gap.join(map(layout.label, actions))
        for rank, actions in enumerate(shown_actions(timeline, layout))
    )
    legend = _fold([*kind_names(timeline), ". idle", *cell_notes(timeline, layout)], width)
    return "\n".join([*(row.rstrip() for row in rows), *legend, *measure_lines(timeline, width)])


def terminal_width() -> int | None:
    """Columns of the terminal that is written to; None for a file or a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def labelled_layout(
    timeline: Timeline, width: int | None, more_namings: Iterable[Naming] = ()
) -> Layout | None:
    """A label in every cell: the most generous layout that fits in `width`, if any does."""
    naming = full_name if timeline.num_stages > timeline.num_ranks else short_name
    styles: list[tuple[Naming, str, bool]] = [(naming, " ", False), (naming, "", False)]
    if timeline.schedule.is_stream:
        styles = [(versioned(naming), gap, True) for gap in (" ", "")] + styles
    styles += [(name, "", False) for name in more_namings]
    for quantum in (exact_quantum(timeline), rough_quantum(timeline)):
        for name, gap, shows_versions in styles if quantum else ():
            longest = _longest(timeline, name)
            layout = Layout(quantum or 1.0, name, longest, gap, shows_versions)
            if width is None or _row_width(timeline, layout) <= width:
                return layout
    return None


def compact_layout(
    timeline: Timeline, width: int, cells_per_column: int = 1, end: float | None = None
) -> Layout:
    """As many cells as there is room for; whole columns, if there is room for all of them."""
    room = max(width - len(row_name(timeline, 0)), 1) * cells_per_column
    if end:
        return Layout(end / room, letter)
    quantum = exact_quantum(timeline) or 0.0
    cells_per_quantum = (
        min(room // num_cells(timeline, quantum), cells_per_column) if quantum else 0
    )
    if cells_per_quantum:
        return Layout(quantum / cells_per_quantum, letter)
    return Layout((timeline.makespan or 1.0) / room, letter)


def shown_actions(timeline: Timeline, layout: Layout) -> Iterator[list[Action | None]]:
    """For each rank, what its cells show, up to its last action."""
    choose = dithered if layout.name is letter else main_actions
    count = num_cells(timeline, layout.quantum)
    for row in timeline.spans:
        actions = list(choose(cells(row, layout.quantum, count)))
        while actions and actions[-1] is None:
            actions.pop()
        yield actions


def row_name(timeline: Timeline, rank: int) -> str:
    return f"rank {rank:>{len(str(timeline.num_ranks - 1))}} │ "


def cell_notes(timeline: Timeline, layout: Layout) -> list[str]:
    notes = [f"a cell is {number(layout.quantum)}"]
    if hides_actions(timeline, layout.quantum):
        notes.append("shorter actions may not show")
    if layout.shows_versions:
        notes.append("small numbers are versions of the weights")
    return notes


def measure_lines(timeline: Timeline, width: int | None) -> list[str]:
    idle = table(timeline.idle, timeline.makespan) if timeline.idle else ()
    return [*_fold([heading(timeline), *measures(timeline)], width), *idle]


def full_name(action: Action) -> str:
    """`4F0`: where a rank holds several stages."""
    return f"{action.stage}{short_name(action)}"


def short_name(action: Action) -> str:
    return palette.letter(action.kind) + microbatch_name(action)


def microbatch_name(action: Action) -> str:
    return "" if action.microbatch == WHOLE_BATCH else str(action.microbatch)


def versioned(name: Naming) -> Naming:
    """With the version of the weights as a small number."""

    def named(action: Action) -> str:
        has_version = action.version != NO_VERSION and action.kind is not Kind.STEP
        version = str(action.version).translate(SUPERSCRIPT) if has_version else ""
        return name(action) + version

    return named


def kind_names(timeline: Timeline) -> list[str]:
    """Of what takes time: a cell shows nothing else."""
    kinds = palette.lasting_kinds(timeline)
    return [f"{palette.letter(kind)} {palette.NAMES[kind]}" for kind in kinds]


def letter(action: Action) -> str:
    return palette.letter(action.kind)


def _longest(timeline: Timeline, name: Naming) -> int:
    return max((len(name(span.action)) for row in timeline.spans for span in row), default=1)


def _row_width(timeline: Timeline, layout: Layout) -> int:
    cell_width = layout.label_width + len(layout.gap)
    return len(row_name(timeline, 0)) + num_cells(timeline, layout.quantum) * cell_width


def _fold(phrases: list[str], width: int | None) -> list[str]:
    """Phrases in one line, or in as many as a narrow terminal needs."""
    lines = phrases[:1]
    for phrase in phrases[1:]:
        longer = lines[-1] + SEPARATOR + phrase
        if width is None or len(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(phrase)
    return lines
