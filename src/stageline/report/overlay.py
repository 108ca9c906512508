"""Draw a predicted and a measured timeline together: two lanes per rank, on one time scale.

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

from stageline.report.html import LEGIBLE_WHEN_ZOOMED, html_document
from stageline.report.save import write
from stageline.report.summary import sizes
from stageline.report.svg.drawing import (
    LEGIBLE,
    Lane,
    axis,
    document,
    draw_lanes,
    group,
    header,
    legend,
)
from stageline.report.svg.geometry import TOP, Geometry, geometry_of
from stageline.report.svg.lane_elements import px
from stageline.report.text.grid import (
    SEPARATOR,
    GridLayout,
    kind_names,
    letter,
    shown_actions,
    terminal_width,
)
from stageline.report.timeline import Timeline

MARGIN = 48.0  # more than for a single timeline, because names are longer
WIDTH = 100  # columns, if there is no terminal
CLOSER = 0.1  # distance by which the two lanes of a rank are closer together, in pitches


@dataclass(frozen=True)
class Overlay:
    """The predicted and the measured timeline of one schedule, with a title and a caption."""

    predicted: Timeline
    measured: Timeline
    title: str
    caption: str

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a picture in the format of the suffix: .svg or .html."""
        write(path, "an overlay", {".svg": self.svg, ".html": self.page})

    def svg(self, min_font: float = LEGIBLE) -> str:
        """Return the SVG picture."""
        geometry = geometry_of(self._both, min_font)
        parts = (
            header(self.title, sizes(self.measured), self.caption),
            legend(self._both, geometry),
            axis(self._both.makespan, geometry),
            draw_lanes(self._lanes(geometry), self._both, geometry),
        )
        picture = group("timeline", f"{px(MARGIN)} 0", chain.from_iterable(parts))
        return document(self._both, geometry, (geometry.width + MARGIN, geometry.height), picture)

    def page(self) -> str:
        """Return the HTML page."""
        return html_document(f"{self.title}: {self.caption}", self.svg(LEGIBLE_WHEN_ZOOMED))

    def __str__(self) -> str:
        """Return two rows of letters per rank, as wide as the terminal, if there is one."""
        return self.text(terminal_width() or WIDTH)

    def text(self, width: int) -> str:
        """Return two rows of letters per rank, at most `width` columns wide."""
        columns = width - len(f"{self._names[0]} │ ")
        layout = GridLayout(self._both.makespan / max(columns, 1), letter)
        rows = zip(self._names, shown_actions(self._both, layout), strict=True)
        grid = [f"{name} │ {''.join(map(layout.label, row))}" for name, row in rows]
        return "\n".join([*grid, SEPARATOR.join([*kind_names(self._both), ". idle"]), self.caption])

    @cached_property
    def _both(self) -> Timeline:
        """Return a timeline with two rows per rank, the predicted one first."""
        pairs = zip(self.predicted.spans, self.measured.spans, strict=True)
        return Timeline(tuple(chain.from_iterable(pairs)), self.measured.placement)

    @cached_property
    def _names(self) -> list[str]:
        """Return the names of the lanes, all of the same length."""
        width = len(str(self.measured.num_ranks - 1))
        ranks = (f"rank {rank:>{width}} predicted" for rank in range(self.measured.num_ranks))
        return [name for rank in ranks for name in (rank, "measured".rjust(len(rank)))]

    def _lanes(self, geometry: Geometry) -> Iterator[Lane]:
        ends = cycle((self.predicted.makespan, self.measured.makespan))
        shifts = cycle((CLOSER, -CLOSER))
        rows = zip(self._names, self._both.spans, ends, shifts, strict=False)
        for number, (name, row, end, shift) in enumerate(rows):
            yield Lane(name.strip(), TOP + (number + shift) * geometry.pitch, row, end)
