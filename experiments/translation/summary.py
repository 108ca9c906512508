"""Figures of tables and pictures, computed from the results alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, stdev

from experiments.results import Run
from experiments.translation.data import FEW
from experiments.translation.experiment import (
    batch_size_name,
    bilingual_name,
    multilingual_name,
    stability_name,
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
    return _finished(runs, (multilingual_name(size, seed) for seed in scale.seeds))


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


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Return the mean, with the standard deviation of a single value if there are several.

    >>> spread([20.0, 22.0]), spread([20.0])
    ('21.0 ± 1.4', '20.0')
    """
    if not values:
        return "–"
    mean = f"{fmean(values):.{digits}f}"
    return f"{mean} ± {stdev(values):.{digits}f}" if len(values) > 1 else mean


def baselines(runs: Runs, scale: Scale) -> dict[str, list[Run]]:
    """Return the bilingual runs of each language, one for each seed.

    They have the number of steps with the best mean BLEU on the validation strings.
    """
    found: dict[str, list[Run]] = {}
    for language in ordered_groups(runs):
        by_steps = [
            _finished(runs, (bilingual_name(language, steps, seed) for seed in scale.seeds))
            for steps in scale.bilingual_steps
        ]
        if all(by_steps):
            found[language] = max(by_steps, key=_validation_bleu)
    return found


def _validation_bleu(found: Sequence[Run]) -> float:
    return fmean(run["validation_bleu"] for run in found)


def gains(runs: Runs, scale: Scale, size: Size, kind: str = "bleu") -> dict[str, float]:
    """Return the score above that of the bilingual baseline, by language."""
    found = of_size(runs, scale, size)
    if not found:
        return {}
    base = baselines(runs, scale)
    return {
        name: mean_score(found, name, kind) - mean_score(alone, name, kind)
        for name, alone in base.items()
    }


def batch_sizes(runs: Runs, scale: Scale) -> dict[int, list[Run]]:
    """Return the runs of each size of batches that are finished, one for each seed."""
    every = {
        count: _finished(runs, (batch_size_name(count, seed) for seed in scale.seeds))
        for count in scale.batch_tokens
    }
    return {count: found for count, found in every.items() if found}


def of_remedy(runs: Runs, scale: Scale, remedy: str, rate: float) -> list[Run]:
    """Return the runs of a remedy at a learning rate that are finished, one for each seed."""
    return _finished(runs, (stability_name(remedy, rate, seed) for seed in scale.seeds))


def _finished(runs: Runs, names: Iterable[str]) -> list[Run]:
    return [runs[name] for name in names if name in runs]


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Return moving averages over `window` values, fewer at both ends.

    >>> smoothed([1.0, 2.0, 6.0], window=3)
    [1.5, 3.0, 4.0]
    """
    half = window // 2
    return [fmean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]
