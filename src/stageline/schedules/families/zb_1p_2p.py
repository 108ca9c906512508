"""ZB-1p and ZB-2p (Zero Bubble, arXiv 2401.10241): orders that are searched for given costs.

ZB-1p keeps the memory of 1F1B, p activations per rank; ZB-2p takes twice that. The search, and the
options that it takes, are in `search/search.py`.
"""

from __future__ import annotations

from typing import Any

from stageline.schedules.families.zbv import zbv
from stageline.schedules.schedule import Schedule
from stageline.schedules.search.search import search_schedule


def zb_1p(num_ranks: int, num_microbatches: int, **options: Any) -> Schedule:
    """Return the best order found with p activations per rank."""
    options.setdefault("memory_limit", num_ranks)
    return search_schedule(num_ranks, num_microbatches, **options)


def zb_2p(num_ranks: int, num_microbatches: int, **options: Any) -> Schedule:
    """Return the best order found with 2p activations per rank."""
    options.setdefault("memory_limit", 2 * num_ranks)
    return search_schedule(num_ranks, num_microbatches, **options)


def zbv_or_searched(num_ranks: int, num_microbatches: int, **options: Any) -> Schedule:
    """Return ZB-V, or with any option the best order found on its placement with p activations."""
    if not options:
        return zbv(num_ranks, num_microbatches)
    options.setdefault("memory_limit", num_ranks)
    return search_schedule(num_ranks, num_microbatches, placement="v", **options)
