"""Represent the values passed between stages, and determine which of them need a message."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from stageline.arguments import shown
from stageline.errors import ScheduleError
from stageline.schedules.action import Action, Kind
from stageline.schedules.placement import Placement, Replicas, rank_of

Edge = tuple[int, int]  # the stage that writes a value, and the stage that reads it


def chain(num_stages: int) -> tuple[Edge, ...]:
    """Return the edges of a pipeline in which every stage reads the output of the previous one."""
    return tuple((stage, stage + 1) for stage in range(num_stages - 1))


@dataclass(frozen=True)
class Routes:
    """The edges of a pipeline on a placement: which messages each action needs and sends."""

    edges: tuple[Edge, ...]
    placement: Placement
    replicas: Replicas = ()

    @cached_property
    def writers(self) -> list[list[int]]:
        """Return, for each stage, the stages whose values it reads."""
        found: list[list[int]] = [[] for _ in self.placement]
        for writer, reader in self.edges:
            found[reader].append(writer)
        return found

    @cached_property
    def readers(self) -> list[list[int]]:
        """Return, for each stage, the stages that read its values."""
        found: list[list[int]] = [[] for _ in self.placement]
        for writer, reader in self.edges:
            found[writer].append(reader)
        return found

    def rank_of(self, stage: int, microbatch: int) -> int:
        """Return the rank that runs a micro-batch on a stage."""
        return rank_of(self.placement, self.replicas, stage, microbatch)

    def crosses(self, stage: int, other: int) -> bool:
        """Return whether two stages are on different ranks, so that values between them are sent.

        Replicas need no attention here: a stage with replicas shares its ranks with no other.
        """
        return self.placement[stage] != self.placement[other]

    def sends(self, action: Action) -> list[Action]:
        """Return the sends that follow an action."""
        kind, _, targets = self._message(action)
        stage, microbatch = action.stage, action.microbatch
        return [Action(stage, kind, microbatch, t) for t in targets if self.crosses(stage, t)]

    def awaited(self, action: Action) -> list[Action]:
        """Return the sends of the messages that an action needs."""
        kind, sources, _ = self._message(action)
        stage, microbatch = action.stage, action.microbatch
        return [Action(s, kind, microbatch, stage) for s in sources if self.crosses(stage, s)]

    def _message(self, action: Action) -> tuple[Kind, list[int], list[int]]:
        """Return the kind of an action's messages, and the stages they come from and go to."""
        writers, readers = self.writers[action.stage], self.readers[action.stage]
        if action.kind is Kind.F:
            return Kind.SEND_F, writers, readers
        is_gradient = action.kind is Kind.I or action.kind is Kind.B
        return (Kind.SEND_B, readers, writers) if is_gradient else (Kind.SEND_B, [], [])


def checked_edges(edges: Iterable[Edge], num_stages: int) -> tuple[Edge, ...]:
    """Return the edges without duplicates; raise `ScheduleError` for an invalid one."""
    if not isinstance(edges, Iterable):
        raise ScheduleError(
            f"edges is {shown(edges)}, but must be a list of (writer, reader) pairs of stages"
        )
    found: dict[Edge, None] = {}
    for edge in edges:
        is_pair = isinstance(edge, tuple) and [type(stage) for stage in edge] == [int, int]
        if not is_pair or not 0 <= edge[0] < edge[1] < num_stages:
            raise ScheduleError(
                f"edge {shown(edge)} is invalid: give (writer, reader), a stage and a later one, "
                f"both from 0 to {num_stages - 1}"
            )
        found[edge] = None
    return tuple(found)
