"""Describe a timeline in words: its sizes and measures, for headings and footers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, islice, pairwise

from stageline.report.timeline import Timeline

MOST_DIGITS = 7  # of a tick: there is room for them
MOST_GROUPS = 16
SUFFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def heading(timeline: Timeline) -> str:
    """Return the name and sizes of a timeline."""
    return ", ".join(part for part in (timeline.name, sizes(timeline)) if part)


def sizes(timeline: Timeline) -> str:
    """Return the numbers of ranks, mini-batches and micro-batches."""
    schedule = timeline.schedule
    each = _count(schedule.num_microbatches, "micro-batch")
    work = f"{_count(schedule.num_minibatches, 'mini-batch')} of {each}"
    return f"{_count(timeline.num_ranks, 'rank')}, {work if schedule.is_stream else each}"


def measure_phrases(timeline: Timeline) -> Iterator[str]:
    """Yield makespan, bubbles and peaks, each as a phrase."""
    yield f"makespan {number(timeline.makespan)}{_bound(timeline)}"
    yield f"step bubble {percent(timeline.step_bubble)}"
    yield f"span bubble {percent(timeline.span_bubble)}"
    if timeline.schedule.is_stream and timeline.steady_busy:
        yield f"busy between fill and drain {share_range(timeline.steady_busy)}"
    if any(timeline.memory):
        yield f"peak activations {_peak(timeline.peak_activations)}"
        if timeline.peak_memory != timeline.peak_activations:
            yield f"peak memory {_peak(timeline.peak_memory)}"


def number(value: float, digits: int = 4) -> str:
    """Return a number with at most four digits, and a suffix if it is large.

    >>> number(33.0), number(0.12345), number(23_622_320_128)
    ('33', '0.1235', '23.62G')
    """
    if abs(value) >= 9999.5:
        for size, suffix in SUFFIXES:
            if abs(value) >= size:
                return f"{value / size:.{digits}g}{suffix}"
    return f"{value:.{digits}g}"


def tick_numbers(values: Sequence[float]) -> list[str]:
    """Return the values of ticks with as many digits as tell them apart.

    >>> tick_numbers([97.19, 97.195, 97.2]), tick_numbers([10, 20])
    (['97.19', '97.195', '97.2'], ['10', '20'])
    """
    distance = min((b - a for a, b in pairwise(values)), default=0.0)
    for digits in range(4, MOST_DIGITS):
        if all(abs(float(f"{value:.{digits}g}") - value) <= distance / 100 for value in values):
            return [number(value, digits) for value in values]
    return [number(value, MOST_DIGITS) for value in values]


def percent(share: float) -> str:
    """Return a fraction in percent."""
    return f"{100 * share:.1f} %"


def share_range(shares: tuple[float, ...]) -> str:
    """Return the least and the greatest of several fractions, in percent."""
    least, most = percent(min(shares)), percent(max(shares))
    return most if least == most else f"{least.removesuffix(' %')} to {most}"


def _count(count: int, noun: str) -> str:
    plural = "es" if noun.endswith("ch") else "s"
    return f"{count} {noun}{plural if count != 1 else ''}"


def _bound(timeline: Timeline) -> str:
    """Return a note on the lower bound for this placement and memory, if there is one."""
    if not timeline.lower_bound:
        return ""
    is_least = timeline.makespan <= timeline.lower_bound * (1 + 1e-9)
    return (
        " (optimal for this memory)"
        if is_least
        else f" (lower bound {number(timeline.lower_bound)})"
    )


def _peak(peaks: tuple[float, ...]) -> str:
    """Return the highest peak, and its rank unless all ranks have the same."""
    highest = max(peaks)
    where = "" if min(peaks) == highest else f" (rank {peaks.index(highest)})"
    return number(highest) + where


def recomputation(modes: Sequence[str]) -> str:
    """Return how each stage is recomputed, as a line; nothing if none is.

    >>> recomputation(("selective", "never", "always")), recomputation(("always",) * 9)
    ('recomputation by stage: selective, never, always', 'recomputation: always')
    >>> recomputation(("never", "never"))
    ''
    """
    if not set(modes) - {"never"}:
        return ""
    return f"recomputation{' by stage' if len(set(modes)) > 1 else ''}: {in_groups(modes)}"


def in_groups(words: Sequence[str]) -> str:
    """Return a word for each stage, equal ones together; one word if it is that of all.

    >>> in_groups(("always", "always", "selective", "never")), in_groups(("never",) * 8)
    ('2 × always, selective, never', 'never')
    """
    if len(set(words)) == 1:
        return words[0]
    groups = ((word, len(list(same))) for word, same in groupby(words))
    shown = [
        f"{count} × {word}" if count > 1 else word for word, count in islice(groups, MOST_GROUPS)
    ]
    return ", ".join([*shown, "…"] if next(groups, None) else shown)
