"""From a name and sizes to a schedule: the table of all families."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import Any, NamedTuple

from stageline.arguments import check_arguments, check_size, check_type, shown
from stageline.costs import Costs
from stageline.errors import ScheduleError
from stageline.limits import MOST_STAGES, check_most, check_pipeline
from stageline.schedules.families.dualpipe_v import dualpipe_v
from stageline.schedules.families.gpipe import gpipe
from stageline.schedules.families.hanayo import hanayo
from stageline.schedules.families.interleaved_1f1b import interleaved_1f1b
from stageline.schedules.families.looped_bfs import looped_bfs
from stageline.schedules.families.naive import naive
from stageline.schedules.families.one_f_one_b import one_f_one_b
from stageline.schedules.families.pipedream import pipedream
from stageline.schedules.families.pipedream_2bw import pipedream_2bw
from stageline.schedules.families.v_half import v_half
from stageline.schedules.families.v_min import v_min
from stageline.schedules.families.zb_h1 import zb_h1
from stageline.schedules.families.zb_h2 import zb_h2
from stageline.schedules.families.zbv import zbv
from stageline.schedules.program.stream import as_stream
from stageline.schedules.schedule import Schedule
from stageline.schedules.search.search import search_schedule


class Family(NamedTuple):
    """How a schedule is built, what it is in a line, and which options it takes."""

    build: Callable[..., Schedule]
    summary: str
    options: tuple[str, ...] = ()
    chunks: int = 1  # that a rank holds, if nothing is said
    is_synchronous: bool = True  # all of a mini-batch is done before its step, and no more
    is_walked: bool = (
        False  # built slot by slot: fill and drain of 2p micro-batches take their time
    )

    def check_sizes(
        self, num_ranks: int, num_stages: int, num_microbatches: int, num_minibatches: int | None
    ) -> None:
        """Raise if a schedule of these sizes could not be held in memory."""
        check_most("num_ranks", num_ranks, MOST_STAGES)
        if num_minibatches is None:  # an asynchronous one has as many as let it repeat itself
            repeats = 3 * (num_ranks // num_microbatches) + 4
            num_minibatches = 1 if self.is_synchronous else repeats
        least = 2 * num_ranks if self.is_walked else 1
        check_pipeline(num_stages, max(num_microbatches, least), num_minibatches)


def zb_1p(num_ranks: int, num_microbatches: int, **options: Any) -> Schedule:
    options.setdefault("memory_limit", num_ranks)
    return search_schedule(num_ranks, num_microbatches, **options)


def zb_2p(num_ranks: int, num_microbatches: int, **options: Any) -> Schedule:
    options.setdefault("memory_limit", 2 * num_ranks)
    return search_schedule(num_ranks, num_microbatches, **options)


def zbv_for_costs(num_ranks: int, num_microbatches: int, **options: Any) -> Schedule:
    if not options:
        return zbv(num_ranks, num_microbatches)
    options.setdefault("memory_limit", num_ranks)
    return search_schedule(num_ranks, num_microbatches, placement="v", **options)


LONG_NAME = 100  # characters; beyond that no name was meant
SEARCHED = ("costs", "memory_limit", "time_budget", "seed")
CHUNKS = ("chunks_per_rank",)
FAMILIES = {
    "naive": Family(naive, "one micro-batch at a time, no pipelining"),
    "gpipe": Family(gpipe, "all forwards, then all backwards"),
    "1f1b": Family(one_f_one_b, "PipeDream-Flush: one forward, one backward"),
    "interleaved_1f1b": Family(
        interleaved_1f1b, "Megatron-LM: 1F1B over several chunks", (*CHUNKS, "group_size"), 2
    ),
    "looped_bfs": Family(looped_bfs, "breadth-first over several chunks", CHUNKS, 2),
    "zb_h1": Family(zb_h1, "zero bubble with the memory of 1F1B"),
    "zb_h2": Family(zb_h2, "zero bubble with twice that memory"),
    "zb_1p": Family(zb_1p, "zero bubble searched for costs, p activations", SEARCHED),
    "zb_2p": Family(zb_2p, "zero bubble searched for costs, 2p activations", SEARCHED),
    "zbv": Family(
        zbv_for_costs,
        "zero bubble in a V; searched if costs are given",
        SEARCHED,
        2,
        is_walked=True,
    ),
    "v_half": Family(v_half, "a V with half of the memory", chunks=2, is_walked=True),
    "v_min": Family(v_min, "a V with a third of the memory", chunks=2, is_walked=True),
    "dualpipe_v": Family(dualpipe_v, "DeepSeek's DualPipe, cut in half", chunks=2),
    "hanayo": Family(hanayo, "1F1B in waves", CHUNKS, 2),
    "pipedream": Family(
        pipedream,
        "1F1B without a flush, weights stashed",
        ("vertical_sync", "replicas"),
        is_synchronous=False,
    ),
    "pipedream_2bw": Family(
        pipedream_2bw,
        "1F1B without a flush, two versions of weights",
        ("replicas",),
        is_synchronous=False,
    ),
}


def schedule_names(*, synchronous: bool | None = None) -> tuple[str, ...]:
    """The names that `build_schedule` knows; all, or those that are synchronous, or are not.

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
    """The schedule of that name for these sizes; options that it does not take are refused.

    `costs` are what you will simulate it with, as the command line does: orders that are searched
    for (`zb_1p`, `zb_2p`, `zbv`) are searched for these costs, and others do not depend on them.
    Without costs `zbv` is the order of the paper, and `zb_1p` and `zb_2p` are searched for
    `Costs()`. `memory_limit`, `time_budget` and `seed` are for those that are searched, as in
    `search_schedule`; `chunks_per_rank` and `group_size` for those with several chunks.

    With `num_minibatches`, so many follow each other without a barrier, and the optimizer's steps
    are part of the schedule. Asynchronous ones always have several, so many that they repeat
    themselves if it is not given; theirs are `vertical_sync` and `replicas`, the ranks of each
    stage.

    >>> for row in build_schedule("1f1b", num_ranks=2, num_microbatches=2).actions:
    ...     print(*row)
    0F0 0F1 0B0 0B1
    1F0 1B0 1F1 1B1
    """
    family = family_of(name)
    for size in ("num_ranks", "num_microbatches"):
        check_size(size, locals()[size])
    for size in ("num_minibatches", "chunks_per_rank", "group_size"):
        if locals()[size] is not None:
            check_size(size, locals()[size])
    check_arguments(build_schedule, locals() | {"replicas": None})  # its family checks that
    options: dict[str, Any] = {
        "chunks_per_rank": chunks_per_rank,
        "group_size": group_size,
        "costs": costs,
        "memory_limit": memory_limit,
        "time_budget": time_budget,
        "seed": seed,
        "vertical_sync": vertical_sync,
        "replicas": replicas,
    }
    given = {option: value for option, value in options.items() if value is not None}
    num_stages = num_ranks * (chunks_per_rank or family.chunks)
    if isinstance(replicas, Sequence) and len(replicas) < num_ranks:
        num_stages = len(replicas)
    if costs is not None and "costs" not in family.options:
        costs.check_num_stages(num_stages)
        del given["costs"]  # whatever they are, the order is the same
    _check_options(name, family, given)
    family.check_sizes(num_ranks, num_stages, num_microbatches, num_minibatches)
    if not family.is_synchronous:
        given["num_minibatches"] = num_minibatches
    schedule = replace(family.build(num_ranks, num_microbatches, **given), name=name)
    if family.is_synchronous and num_minibatches is not None:
        return as_stream(schedule, num_minibatches)
    return schedule


def _check_options(name: str, family: Family, given: Iterable[str]) -> None:
    for option in given:
        if option not in family.options:
            takers = [other for other, f in FAMILIES.items() if option in f.options]
            raise ScheduleError(
                f"{name!r} was given {option}, but takes {_listed(family.options) or 'none'}: "
                f"leave it out, or use {_listed(takers, 'or')}"
            )


def family_of(name: str) -> Family:
    check_type("the name of a schedule", name, str, f"use one of {_listed(FAMILIES, 'or')}")
    if name in FAMILIES:
        return FAMILIES[name]
    near = get_close_matches(name, FAMILIES, n=1, cutoff=0.4) if len(name) < LONG_NAME else []
    hint = f"did you mean {near[0]!r}?" if near else f"use one of {_listed(FAMILIES, 'or')}"
    raise ScheduleError(f"schedule {shown(name)} is not known: {hint}")


def _listed(names: Any, last: str = "and") -> str:
    quoted = [str(name) for name in names]
    return f" {last} ".join([", ".join(quoted[:-1]), quoted[-1]] if quoted[1:] else quoted)
