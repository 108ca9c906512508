"""Tables of the results, for the terminal and for the README."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from rich.table import Table

from experiments.translation.errors import TranslationError
from experiments.translation.model import Size
from experiments.translation.scale import REMEDIES, Scale
from experiments.translation.summary import (
    Runs,
    band_scores,
    bands,
    baselines,
    batch_sizes,
    gains,
    of_remedy,
    of_size,
    paired,
    spread,
)

PAPER_BATCHES = (("260K", 30.92, 2.58), ("1M", 31.86, 2.51), ("4M", 32.71, 2.46))


@dataclass(frozen=True)
class Sheet:
    """A table with a title."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def rich(self) -> Table:
        table = Table(title=self.title)
        for column in self.columns:
            table.add_column(column)
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self) -> str:
        lines = [self.columns, ("---",) * len(self.columns), *self.rows]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def size_sheet(runs: Runs, scale: Scale) -> Sheet:
    """BLEU of each size by band of languages: the mean over languages, ± over seeds."""
    groups = bands(runs)
    columns = ("model", "parameters", "seeds", *groups, "gain")
    columns += ("sentence BLEU", "its gain", "loss")
    rows = []
    for size in scale.sizes:
        if found := of_size(runs, scale, size):
            cells = [spread(band_scores(found, names)) for names in groups.values()]
            every = [name for names in groups.values() for name in names]
            cells += [_mean_gain(runs, scale, size, "bleu")]
            cells += [spread(band_scores(found, every, "sentence_bleu"))]
            cells += [_mean_gain(runs, scale, size, "sentence_bleu")]
            cells += [spread([run["loss"] for run in found], 2)]
            rows.append((str(size), f"{found[0]['parameters']:,}", str(len(found)), *cells))
    return Sheet("BLEU into English, by data of the language", columns, tuple(rows))


def _mean_gain(runs: Runs, scale: Scale, size: Size, kind: str) -> str:
    gained = gains(runs, scale, size, kind).values()
    return f"{fmean(gained):+.1f}" if gained else "–"


def gain_sheet(runs: Runs, scale: Scale) -> Sheet:
    """BLEU of each bilingual baseline and the gain of each size over it."""
    base = baselines(runs, scale)
    gained = {str(size): gains(runs, scale, size) for size in scale.sizes}
    gained = {size: found for size, found in gained.items() if found}
    rows = tuple(
        (
            name,
            str(runs["corpus"]["training"][name]),
            spread([run["bleu"][name] for run in alone]),
            *(f"{found[name]:+.1f}" for found in gained.values()),
        )
        for name, alone in base.items()
    )
    columns = ("language", "training pairs", "bilingual BLEU", *gained)
    return Sheet("Gain over bilingual baselines", columns, rows)


def depth_sheet(runs: Runs, scale: Scale) -> Sheet:
    """The deep and the wide model of the same size, seed by seed, at the low-resource end."""
    _, deep, wide, _ = scale.sizes
    pairs = paired(runs, scale, deep, wide)
    rows = []
    for band, names in bands(runs).items():
        sides = [band_scores(side, names) for side in zip(*pairs, strict=True)]
        differences = [a - b for a, b in zip(*sides, strict=True)]
        by_seed = ", ".join(f"{difference:+.1f}" for difference in differences)
        rows.append((band, *(map(spread, sides) if sides else "––"), by_seed))
    columns = ("languages", f"deep {deep}", f"wide {wide}", "deep - wide, by seed")
    return Sheet("Deep and wide models of the same size", columns, tuple(rows))


def batch_sheet(runs: Runs, scale: Scale) -> Sheet:
    """Loss and BLEU by batch size, beside the paper's table 5."""
    paper = [f"{tokens} tokens: {bleu} BLEU, {loss}" for tokens, bleu, loss in PAPER_BATCHES]
    rows = tuple(
        (
            f"{count:,}",
            spread([run["loss"] for run in found], 2),
            spread([fmean(run["bleu"].values()) for run in found]),
            spread([run["bleu"]["de"] for run in found if "de" in run["bleu"]]),
            theirs,
        )
        for (count, found), theirs in zip(batch_sizes(runs, scale).items(), paper, strict=False)
    )
    columns = ("tokens in a batch", "loss", "BLEU", "BLEU of German", "the paper's, German")
    return Sheet("Batch size, at the same optimizer settings and steps", columns, rows)


def stability_sheet(runs: Runs, scale: Scale) -> Sheet:
    """Loss at the end and the worst rise of the loss, for each remedy and learning rate."""
    rows = []
    for remedy in REMEDIES:
        cells = []
        for rate in scale.deep_rates:
            found = of_remedy(runs, scale, remedy, rate)
            final, rise = ([run[name] for run in found] for name in ("final", "worst_rise"))
            cells.append(f"{spread(final, 2)} ({spread(rise, 2)})")
        rows.append((remedy, *cells))
    columns = ("remedy", *(f"rate {rate:g}" for rate in scale.deep_rates))
    title = f"{scale.deep} without warm-up: final loss (worst rise above the least before)"
    return Sheet(title, columns, tuple(rows))


SHEETS: dict[str, Callable[[Runs, Scale], Sheet]] = {
    "sizes": size_sheet,
    "gains": gain_sheet,
    "depth": depth_sheet,
    "batches": batch_sheet,
    "stability": stability_sheet,
}


def write_readme(path: Path, sheets: dict[str, Sheet], facts: str) -> None:
    """Put each table between its markers `<!-- name -->` and `<!-- end of name -->`."""
    text = path.read_text(encoding="utf-8")
    for name, content in [*((n, s.markdown()) for n, s in sheets.items()), ("facts", facts)]:
        text = _between(text, name, content)
    path.write_text(text, encoding="utf-8")


def _between(text: str, name: str, content: str) -> str:
    start, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    if start not in text or end not in text:
        raise TranslationError(f"the README has no markers {start} and {end}: add them")
    before, rest = text.split(start)
    return f"{before}{start}\n{content}\n{end}{rest.split(end)[1]}"


def time_facts(runs: Runs) -> str:
    """Return when and where the results were made, and how long it took."""
    minutes = sum(run["seconds"] for run in runs.values()) / 60
    environments = {tuple(sorted(run["environment"].items())) for run in runs.values()}
    parts = ["; ".join(" ".join(pair) for pair in found) for found in sorted(environments)]
    return f"{len(runs)} runs, {minutes:.0f} minutes of training and testing ({' | '.join(parts)})."
