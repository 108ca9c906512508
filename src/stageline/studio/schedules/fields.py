"""The requests of the page of schedules: what they hold, and the costs that they mean."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from stageline.costs import BETWEEN_STAGES, Costs, costs_of_json
from stageline.errors import ScheduleError
from stageline.schedules.build import family_of
from stageline.schedules.families.registry import ScheduleFamily
from stageline.studio.requests import StudioRequest

# A picture of more would not be legible, nor drawn in time.
MOST_RANKS, MOST_MICROBATCHES, MOST_CHUNKS, MOST_MINIBATCHES = 64, 1024, 8, 64
MOST_ACTIONS = 400_000  # of one schedule
MOST_STREAM_ACTIONS = 30_000  # with optimizer steps: 0.2 ms each when they are first shown
SEARCHED_FAMILIES = ("zb_1p", "zb_2p")  # depend on the costs: the page finds them by a search
MOST_SCHEDULES = 8
MOST_MOVES = 200
MOST_SECONDS = 60.0  # of one search
SLOTS = 3  # actions of a micro-batch on a stage, at most: F, I and W

Ranks = Annotated[int, Field(ge=1, le=MOST_RANKS, strict=True)]
MicroBatches = Annotated[int, Field(ge=1, le=MOST_MICROBATCHES, strict=True)]
MemoryLimit = float | Annotated[str, Field(max_length=100)] | None
Position = Annotated[int, Field(ge=0, le=MOST_ACTIONS, strict=True)]
Move = tuple[Position, Position, Position]  # rank, position of an action, position after the move


class SearchFields(StudioRequest):
    """A search for an order. The same fields always give the same order."""

    num_ranks: Ranks
    num_microbatches: MicroBatches
    costs: dict[str, Any] = Field(default={})
    memory_limit: MemoryLimit = None
    placement: Literal["straight", "v"] = "straight"
    time_budget: float = Field(default=2.0, gt=0, le=MOST_SECONDS)
    seed: int = Field(default=0, ge=0, le=2**31, strict=True)

    @property
    def chunks(self) -> int:
        return 2 if self.placement == "v" else 1

    @property
    def stage_costs(self) -> Costs:
        return stage_costs(self.costs, self.num_ranks, self.chunks)


class ScheduleFields(StudioRequest):
    """A schedule by name or by search, with the moves of its actions by hand."""

    family: str = Field(default="", max_length=100)
    search: SearchFields | None = None  # instead of a family
    num_ranks: Ranks = 4
    num_microbatches: MicroBatches = 8
    chunks_per_rank: int | None = Field(default=None, ge=1, le=MOST_CHUNKS, strict=True)
    num_minibatches: int = Field(default=1, ge=1, le=MOST_MINIBATCHES, strict=True)
    moves: tuple[Move, ...] = Field(default=(), max_length=MOST_MOVES)

    @property
    def key(self) -> str:
        """Return a text that is equal for equal schedules."""
        return self.model_dump_json()

    @property
    def options(self) -> dict[str, Any]:
        """Return the options for `build_schedule`: a family ignores chunks that it does not take.

        A single mini-batch of a synchronous schedule needs no optimizer steps.
        """
        family = family_of(self.family)
        if self.family in SEARCHED_FAMILIES:
            raise ScheduleError(f"{self.family} depends on the costs: search for it")
        given = {"num_ranks": self.num_ranks, "num_microbatches": self.num_microbatches}
        if self.chunks_per_rank is not None and "chunks_per_rank" in family.options:
            given["chunks_per_rank"] = self.chunks_per_rank
        if self.num_minibatches > 1 or not family.is_synchronous:
            given["num_minibatches"] = self.num_minibatches
        self._check_actions(family, given.get("chunks_per_rank", family.chunks))
        return given

    def _check_actions(self, family: ScheduleFamily, chunks: int) -> None:
        least = 2 * self.num_ranks if family.is_filled_by_slots else 1
        places = self.num_ranks * chunks * max(least, self.num_microbatches) * self.num_minibatches
        is_stream = self.num_minibatches > 1 or not family.is_synchronous
        most = MOST_STREAM_ACTIONS if is_stream else MOST_ACTIONS
        if places * SLOTS > most:
            count = f"{self.num_minibatches} mini-batches of {self.num_microbatches} micro-batches"
            raise ScheduleError(
                f"{count} on {self.num_ranks * chunks} stages are up to {places * SLOTS:,} actions,"
                f" but the page draws {most:,} at most{' with steps' if is_stream else ''}: "
                "use fewer"
            )


def stage_costs(given: dict[str, Any], num_ranks: int, chunks: int) -> Costs:
    """Return costs per stage; numbers are for a rank's whole share of the model, as in the CLI.

    A list has a value for each stage, or for each of as many equal parts of the model as there are
    ranks; a part that several stages share is divided evenly over them.
    """
    values = costs_of_json(given, "the JSON")
    Costs(**values)  # its errors name the values that were given, before they are divided
    return Costs.of_a_rank(
        chunks,
        **{
            name: [part / chunks for part in value for _ in range(chunks)]
            if isinstance(value, list) and len(value) == num_ranks and name not in BETWEEN_STAGES
            else value
            for name, value in values.items()
        },
    )
