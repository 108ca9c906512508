"""Mark values by what they depend on: layers, chance, or data in their shapes."""

from __future__ import annotations

from collections.abc import Collection, Iterable


class ValueMarks:
    """State: the names of the values with each mark."""

    def __init__(self) -> None:
        self.layers: set[str] = set()  # computed by layers or with weights, or drawn
        self.chance: set[str] = set()  # drawn, or computed from what was drawn
        self.dynamic: set[str] = set()  # with shapes that follow from data

    def inherited(
        self, read: Collection[str], *, layers: bool, chance: bool, dynamic: bool
    ) -> list[set[str]]:
        """Return the marks of what is computed: those given here, and those of what is read."""
        marks = (self.layers, layers), (self.chance, chance), (self.dynamic, dynamic)
        return [marked for marked, is_new in marks if is_new or not marked.isdisjoint(read)]

    def rename(self, old: str, new: str, marks: Iterable[set[str]]) -> None:
        """Give a changed value its old marks and those of what changed it."""
        kept = [names for names in (self.layers, self.chance, self.dynamic) if old in names]
        for names in (*kept, *marks):
            names.add(new)
