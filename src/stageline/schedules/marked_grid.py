"""Format rows of actions as text, with some cells marked, as errors show them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from stageline.schedules.action import Action

Cell = tuple[int, int]  # a rank, and a position in its row

COLUMNS_AROUND = 5  # on each side of the first marked cell; eleven columns fit in a terminal
RANKS_AROUND = 2


def grid(rows: Sequence[Sequence[Action]]) -> str:
    """Return one line per rank, with its actions separated by spaces."""
    return "\n".join(" ".join(str(action) for action in row) for row in rows)


def marked_grid(rows: Sequence[Sequence[Action]], cells: Collection[Cell]) -> str:
    """Return the rows around the marked cells, each of which is in angle brackets.

    >>> from stageline.schedules.schedule import Schedule
    >>> print(marked_grid(Schedule.from_text("0F0 0B0", "1F0 1B0 1B0").actions, [(1, 2)]))
    rank 0 │  0F0   0B0
    rank 1 │  1F0   1B0  >1B0<
    """
    shown = [rank for rank in range(len(rows)) if _is_near(rank, {rank for rank, _ in cells})]
    lines, previous = [], -1
    for rank in shown:
        if rank > previous + 1:
            lines.append("   ⋮   │")
        lines.append(_marked_row(rank, rows[rank], {p for r, p in cells if r == rank}, cells))
        previous = rank
    if previous + 1 < len(rows):
        lines.append("   ⋮   │")
    return "\n".join(lines)


def _is_near(rank: int, marked: Collection[int]) -> bool:
    return not marked or any(abs(rank - other) <= RANKS_AROUND for other in marked)


def _marked_row(
    rank: int, row: Sequence[Action], marked: Collection[int], cells: Collection[Cell]
) -> str:
    centre = min(marked, default=min((position for _, position in cells), default=0))
    first, last = max(0, centre - COLUMNS_AROUND), centre + COLUMNS_AROUND + 1
    texts = [
        f">{action}<" if position in marked else f" {action} "
        for position, action in list(enumerate(row))[first:last]
    ]
    before, after = "… " if first else "", " …" if last < len(row) else ""
    return f"rank {rank} │ {before}{' '.join(texts)}{after}".rstrip()
