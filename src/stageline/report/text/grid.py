"""Draw a timeline as text: one row per rank, one cell per slot of time.

    rank 0 │ F0 F1 .. .. B0 B0 .. B1 B1
    rank 1 │ .. F0 B0 B0 F1 B1 B1
    F forward · B backward · . idle · a cell is 1
    2 ranks, 2 micro-batches · makespan 9 · step bubble 33.3 % · …

If that is wider than the terminal, a cell is one letter, and each kind has its share of them. In a
stream, a small number is the version of the weights that an action uses: `F4²`.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from stageline.report import palette
from stageline.report.idle import idle_table
from stageline.report.summary import heading, measure_phrases, number
from stageline.report.text.time_cells import (
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


class GridLayout(NamedTuple):
    """The time that a cell represents, and the text that it contains."""

    quantum: float
    name: Naming
    label_width: int = 1
    gap: str = ""  # between cells
    shows_versions: bool = False

    def label(self, action: Action | None) -> str:
        return self.name(action).ljust(self.label_width) if action else "." * self.label_width


def plain(timeline: Timeline, width: int | None = None, end: float | None = None) -> str:
    """Return the grid, at most `width` columns wide, or of any width if that is None.

    `end` is the time at the right edge, to draw several timelines on one scale.
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
    """Return the columns of the terminal; None if the output is a file or a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def labelled_layout(
    timeline: Timeline, width: int | None, more_namings: Iterable[Naming] = ()
) -> GridLayout | None:
    """Return the widest layout with a label in every cell that fits in `width`, if any does."""
    naming = full_name if timeline.num_stages > timeline.num_ranks else short_name
    styles: list[tuple[Naming, str, bool]] = [(naming, " ", False), (naming, "", False)]
    if timeline.schedule.is_stream:
        styles = [(versioned(naming), gap, True) for gap in (" ", "")] + styles
    styles += [(name, "", False) for name in more_namings]
    for quantum in (exact_quantum(timeline), rough_quantum(timeline)):
        for name, gap, shows_versions in styles if quantum else ():
            longest = _longest(timeline, name)
            layout = GridLayout(quantum or 1.0, name, longest, gap, shows_versions)
            if width is None or _row_width(timeline, layout) <= width:
                return layout
    return None


def compact_layout(
    timeline: Timeline, width: int, cells_per_column: int = 1, end: float | None = None
) -> GridLayout:
    """Return the layout with as many cells as fit in `width`."""
    max_cells = max(width - len(row_name(timeline, 0)), 1) * cells_per_column
    if end:
        return GridLayout(end / max_cells, letter)
    quantum = exact_quantum(timeline) or 0.0
    cells_per_quantum = (
        min(max_cells // num_cells(timeline, quantum), cells_per_column) if quantum else 0
    )
    if cells_per_quantum:
        return GridLayout(quantum / cells_per_quantum, letter)
    return GridLayout((timeline.makespan or 1.0) / max_cells, letter)


def shown_actions(timeline: Timeline, layout: GridLayout) -> Iterator[list[Action | None]]:
    """Yield what the cells of each rank show, up to its last action."""
    choose = dithered if layout.name is letter else main_actions
    count = num_cells(timeline, layout.quantum)
    for row in timeline.spans:
        actions = list(choose(cells(row, layout.quantum, count)))
        while actions and actions[-1] is None:
            actions.pop()
        yield actions


def row_name(timeline: Timeline, rank: int) -> str:
    """Return the text to the left of a rank's row."""
    return f"rank {rank:>{len(str(timeline.num_ranks - 1))}} │ "


def cell_notes(timeline: Timeline, layout: GridLayout) -> list[str]:
    """Return notes on the cells, for the legend."""
    notes = [f"a cell is {number(layout.quantum)}"]
    if hides_actions(timeline, layout.quantum):
        notes.append("shorter actions may be hidden")
    if layout.shows_versions:
        notes.append("small numbers are weight versions")
    return notes


def measure_lines(timeline: Timeline, width: int | None) -> list[str]:
    """Return the lines below the grid."""
    idle = idle_table(timeline.idle, timeline.makespan) if timeline.idle else ()
    return [*_fold([heading(timeline), *measure_phrases(timeline)], width), *idle]


def full_name(action: Action) -> str:
    """Return the name of an action with its stage, such as `4F0`."""
    return f"{action.stage}{short_name(action)}"


def short_name(action: Action) -> str:
    """Return the name of an action without its stage, such as `F0`."""
    return palette.letter(action.kind) + microbatch_name(action)


def microbatch_name(action: Action) -> str:
    """Return the number of an action's micro-batch, if it has one."""
    return "" if action.microbatch == WHOLE_BATCH else str(action.microbatch)


def versioned(name: Naming) -> Naming:
    """Return a naming that adds the weight version as a small number."""

    def named(action: Action) -> str:
        has_version = action.version != NO_VERSION and action.kind is not Kind.STEP
        version = str(action.version).translate(SUPERSCRIPT) if has_version else ""
        return name(action) + version

    return named


def kind_names(timeline: Timeline) -> list[str]:
    """Return letters and names of the kinds that take time: a cell shows no others."""
    kinds = palette.lasting_kinds(timeline)
    return [f"{palette.letter(kind)} {palette.NAMES[kind]}" for kind in kinds]


def letter(action: Action) -> str:
    """Return the letter of an action's kind."""
    return palette.letter(action.kind)


def _longest(timeline: Timeline, name: Naming) -> int:
    return max((len(name(span.action)) for row in timeline.spans for span in row), default=1)


def _row_width(timeline: Timeline, layout: GridLayout) -> int:
    cell_width = layout.label_width + len(layout.gap)
    return len(row_name(timeline, 0)) + num_cells(timeline, layout.quantum) * cell_width


def _fold(phrases: list[str], width: int | None) -> list[str]:
    """Return phrases as one line, or as several if `width` is too small for one."""
    lines = phrases[:1]
    for phrase in phrases[1:]:
        longer = lines[-1] + SEPARATOR + phrase
        if width is None or len(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(phrase)
    return lines
