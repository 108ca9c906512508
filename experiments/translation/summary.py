"""Figures of tables and pictures, computed from the results alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, stdev

from experiments.results import Run
from experiments.translation.data import FEW
from experiments.translation.experiment import (
    batch_size_name,
    bilingual_name,
    multilingual_name,
)
from experiments.translation.model import Size
from experiments.translation.scale import Scale

Runs = Mapping[str, Run]
BANDS = ("most data", "middle", "least data")


def ordered_groups(runs: Runs) -> list[str]:
    """Return the languages that are scored alone, from the most data to the least."""
    counts = runs["corpus"]["training"]
    alone = [group for group in runs["corpus"]["groups"] if group != FEW]
    return sorted(alone, key=lambda name: (-counts[name], name))


def bands(runs: Runs) -> dict[str, list[str]]:
    """Return thirds of the languages by data, and the group of those with few test strings."""
    order = ordered_groups(runs)
    ends = [round(i * len(order) / 3) for i in range(4)]
    thirds = {name: order[ends[i] : ends[i + 1]] for i, name in enumerate(BANDS)}
    few = [FEW] if FEW in runs["corpus"]["groups"] else []
    return {name: groups for name, groups in (*thirds.items(), (FEW, few)) if groups}


def of_size(runs: Runs, scale: Scale, size: Size) -> list[Run]:
    """Return the multilingual runs of a size that are finished, one for each seed."""
    names = [multilingual_name(size, seed) for seed in scale.seeds_of(size)]
    return [runs[name] for name in names if name in runs]


def paired(runs: Runs, scale: Scale, first: Size, second: Size) -> list[tuple[Run, Run]]:
    """Return the runs of two sizes by seed, where both are finished."""
    names = [[multilingual_name(size, seed) for size in (first, second)] for seed in scale.seeds]
    return [(runs[one], runs[two]) for one, two in names if one in runs and two in runs]


def band_scores(found: Sequence[Run], groups: Sequence[str], kind: str = "bleu") -> list[float]:
    """Return the mean score of a band of languages for each seed."""
    return [fmean(run[kind][group] for group in groups) for run in found]


def mean_score(found: Sequence[Run], group: str, kind: str = "bleu") -> float:
    """Return a language's score, averaged over seeds."""
    return fmean(run[kind][group] for run in found)


def spread(values: Sequence[float]) -> str:
    """Return the mean, with the standard deviation of a single value if there are several.

    >>> spread([20.0, 22.0]), spread([20.0])
    ('21.0 ± 1.4', '20.0')
    """
    if not values:
        return "–"
    mean = f"{fmean(values):.1f}"
    return f"{mean} ± {stdev(values):.1f}" if len(values) > 1 else mean


def baselines(runs: Runs, scale: Scale) -> dict[str, Run]:
    """Return the bilingual run of each language that has the best BLEU on the test strings.

    This favours the baselines. The loss of the validation strings chooses the same runs, except for
    a language with few of them, whose better run it rejects.
    """
    found: dict[str, Run] = {}
    for language in ordered_groups(runs):
        names = [bilingual_name(language, steps) for steps in scale.bilingual_steps]
        if all(name in runs for name in names):
            every = [runs[name] for name in names]
            found[language] = max(every, key=lambda run: run["bleu"][language])
    return found


def gains(runs: Runs, scale: Scale, size: Size, kind: str = "bleu") -> dict[str, float]:
    """Return the score above that of the bilingual baseline, by language."""
    found = of_size(runs, scale, size)
    if not found:
        return {}
    base = baselines(runs, scale)
    return {name: mean_score(found, name, kind) - run[kind][name] for name, run in base.items()}


def batch_sizes(runs: Runs, scale: Scale) -> dict[int, Run]:
    names = {count: batch_size_name(count) for count in scale.batch_tokens}
    return {count: runs[name] for count, name in names.items() if name in runs}


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Return moving averages over `window` values, fewer at both ends.

    >>> smoothed([1.0, 2.0, 6.0], window=3)
    [1.5, 3.0, 4.0]
    """
    half = window // 2
    return [fmean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]
