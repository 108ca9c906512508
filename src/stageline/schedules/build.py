"""Build a schedule from its name and sizes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from stageline.arguments import check_arguments, check_size, check_type, shown
from stageline.costs import Costs
from stageline.errors import ScheduleError
from stageline.schedules.families.registry import FAMILIES, ScheduleFamily
from stageline.schedules.program.stream import as_stream
from stageline.schedules.schedule import Schedule

LONG_NAME = 100  # characters; a longer name is not a misspelled one


def schedule_names(*, synchronous: bool | None = None) -> tuple[str, ...]:
    """Return the names of all schedules, or only of the synchronous or asynchronous ones.

    >>> schedule_names()[:3], schedule_names(synchronous=False)
    (('naive', 'gpipe', '1f1b'), ('pipedream', 'pipedream_2bw'))
    """
    return tuple(
        name
        for name, family in FAMILIES.items()
        if synchronous is None or family.is_synchronous == synchronous
    )


def build_schedule(
    name: str,
    *,
    num_ranks: int,
    num_microbatches: int,
    chunks_per_rank: int | None = None,
    group_size: int | None = None,
    costs: Costs | None = None,
    memory_limit: float | str | None = None,
    time_budget: float | None = None,
    seed: int | None = None,
    num_minibatches: int | None = None,
    vertical_sync: bool | None = None,
    replicas: Sequence[int] | None = None,
) -> Schedule:
    """Return the schedule of this name; raise `ScheduleError` for an option that it does not take.

    - `chunks_per_rank`: stages per rank of interleaved_1f1b, looped_bfs and hanayo; 2 by default.
    - `group_size`: micro-batches that interleaved_1f1b runs through a chunk before the next one;
      by default the number of ranks, if it divides `num_microbatches`.
    - `costs`: the costs for which zb_1p, zb_2p and zbv are searched. By default zbv is the order
      of the paper, and the others use `Costs()`. Costs have no effect on other schedules.
    - `memory_limit`, `time_budget`, `seed`: for the same three, as in `search_schedule`.
    - `num_minibatches`: mini-batches to run without a barrier, with optimizer steps as actions.
      By default a synchronous schedule has one mini-batch and no steps, and an asynchronous one
      (pipedream, pipedream_2bw) has enough of them to fill the pipeline.
    - `vertical_sync`: if True, a micro-batch uses the same weight version on all stages of
      pipedream; by default each stage uses its latest version (weight stashing).
    - `replicas`: ranks of each stage of pipedream and pipedream_2bw, as in [3, 1]. Their sum is
      `num_ranks`, and each of them divides `num_microbatches`.

    >>> print(build_schedule("1f1b", num_ranks=2, num_microbatches=2))
    0F0 0F1 0B0 0B1
    1F0 1B0 1F1 1B1
    """
    return _build(**locals())


SIZES = ("num_ranks", "num_microbatches")
OPTIONAL_SIZES = ("num_minibatches", "chunks_per_rank", "group_size")


def _build(
    name: str, num_ranks: int, num_microbatches: int, num_minibatches: int | None, **options: Any
) -> Schedule:
    family = family_of(name)
    sizes = {"num_ranks": num_ranks, "num_microbatches": num_microbatches}
    _check_values(options | sizes | {"num_minibatches": num_minibatches})
    given = {option: value for option, value in options.items() if value is not None}
    num_stages = _num_stages(family, num_ranks, given)
    if "costs" in given and "costs" not in family.options:
        given.pop("costs").check_num_stages(num_stages)  # the order does not depend on them
    _check_options(name, family, given)
    family.check_sizes(num_ranks, num_stages, num_microbatches, num_minibatches)
    if not family.is_synchronous:
        given["num_minibatches"] = num_minibatches
    schedule = replace(family.build(num_ranks, num_microbatches, **given), name=name)
    if family.is_synchronous and num_minibatches is not None:
        return as_stream(schedule, num_minibatches)
    return schedule


def _check_values(values: dict[str, Any]) -> None:
    for name in SIZES:
        check_size(name, values[name])
    for name in OPTIONAL_SIZES:
        if values[name] is not None:
            check_size(name, values[name])
    check_arguments(build_schedule, values | {"replicas": None})  # the family checks replicas


def _num_stages(family: ScheduleFamily, num_ranks: int, given: dict[str, Any]) -> int:
    replicas = given.get("replicas")
    if isinstance(replicas, Sequence) and len(replicas) < num_ranks:
        return len(replicas)
    return num_ranks * int(given.get("chunks_per_rank", family.chunks))


def _check_options(name: str, family: ScheduleFamily, given: Iterable[str]) -> None:
    for option in given:
        if option not in family.options:
            takers = [other for other, f in FAMILIES.items() if option in f.options]
            raise ScheduleError(
                f"{option} was given for {name!r}, which takes {_listed(family.options) or 'none'}"
                f": omit it, or use {_listed(takers, 'or')}"
            )


def family_of(name: str) -> ScheduleFamily:
    """Return the family of this name; raise `ScheduleError` if there is none."""
    check_type("the name of a schedule", name, str, f"use one of {_listed(FAMILIES, 'or')}")
    if name in FAMILIES:
        return FAMILIES[name]
    near = (
        get_close_matches(name.lower(), FAMILIES, n=1, cutoff=0.5) if len(name) < LONG_NAME else []
    )
    hint = f"did you mean {near[0]!r}?" if near else f"use one of {_listed(FAMILIES, 'or')}"
    raise ScheduleError(f"schedule {shown(name)} is not known: {hint}")


def _listed(names: Collection[str], last: str = "and") -> str:
    *others, final = names or [""]
    return f"{', '.join(others)} {last} {final}" if others else final
