"""What was predicted over what was measured: two lanes for each rank, on one scale of time.

rank 0 predicted │ FFBB..BB
        measured │ FFBBB..BBB
rank 1 predicted │ ..FBBFBB
        measured │ ..FFBBBFBB
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, cycle

from stageline.report.files import write
from stageline.report.html import LEGIBLE_WHEN_ZOOMED, framed
from stageline.report.summary import sizes
from stageline.report.svg.drawing import LEGIBLE, Lane, axis, document, drawn, group, header, legend
from stageline.report.svg.frame import TOP, Frame, frame_of
from stageline.report.svg.lanes import px
from stageline.report.text.grid import (
    SEPARATOR,
    Layout,
    kind_names,
    letter,
    shown_actions,
    terminal_width,
)
from stageline.report.timeline import Timeline

MARGIN = 48.0  # beside that of a single timeline: names are longer
WIDTH = 100  # columns, where there is no terminal
CLOSER = 0.1  # to the other lane of its rank, in pitches


@dataclass(frozen=True)
class Overlay:
    """Two timelines of one schedule, with a line that says what to see in them."""

    predicted: Timeline
    measured: Timeline
    title: str
    caption: str

    def save(self, path: str | os.PathLike[str]) -> None:
        """Draw it as the suffix says: .svg or .html."""
        write(path, "an overlay", {".svg": self.svg, ".html": self.page})

    def svg(self, min_font: float = LEGIBLE) -> str:
        frame = frame_of(self._both, min_font)
        parts = (
            header(self.title, sizes(self.measured), self.caption),
            legend(self._both, frame),
            axis(self._both.makespan, frame),
            drawn(self._lanes(frame), self._both, frame),
        )
        picture = group("timeline", f"{px(MARGIN)} 0", chain.from_iterable(parts))
        return document(self._both, frame, (frame.width + MARGIN, frame.height), picture)

    def page(self) -> str:
        return framed(f"{self.title}: {self.caption}", self.svg(LEGIBLE_WHEN_ZOOMED))

    def __str__(self) -> str:
        """Two rows of letters for each rank; as wide as the terminal, if it is printed to one."""
        return self.text(terminal_width() or WIDTH)

    def text(self, width: int) -> str:
        room = width - len(f"{self._names[0]} │ ")
        layout = Layout(self._both.makespan / max(room, 1), letter)
        rows = zip(self._names, shown_actions(self._both, layout), strict=True)
        grid = [f"{name} │ {''.join(map(layout.label, row))}" for name, row in rows]
        return "\n".join([*grid, SEPARATOR.join([*kind_names(self._both), ". idle"]), self.caption])

    @cached_property
    def _both(self) -> Timeline:
        """As if every rank were two."""
        pairs = zip(self.predicted.spans, self.measured.spans, strict=True)
        return Timeline(tuple(chain.from_iterable(pairs)), self.measured.placement)

    @cached_property
    def _names(self) -> list[str]:
        """Of the lanes, all of the same length."""
        width = len(str(self.measured.num_ranks - 1))
        ranks = (f"rank {rank:>{width}} predicted" for rank in range(self.measured.num_ranks))
        return [name for rank in ranks for name in (rank, "measured".rjust(len(rank)))]

    def _lanes(self, frame: Frame) -> Iterator[Lane]:
        ends = cycle((self.predicted.makespan, self.measured.makespan))
        shifts = cycle((CLOSER, -CLOSER))
        rows = zip(self._names, self._both.spans, ends, shifts, strict=False)
        for number, (name, row, end, shift) in enumerate(rows):
            yield Lane(name.strip(), TOP + (number + shift) * frame.pitch, row, end)
