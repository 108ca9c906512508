"""The HTML page of several runs: their curves over each other, and how they differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from stageline.runs.breakdown import PARTS, RankTime
from stageline.runs.findings.findings import findings
from stageline.runs.pages import figures, sections
from stageline.runs.pages.bars import time_bars
from stageline.runs.pages.elements import document, legend, paragraph, section, table
from stageline.runs.pages.style import run_class
from stageline.runs.run import Run

MOST_ERRORS = 3  # of a run
Pairs = Callable[[Run], Iterable[tuple[str, str]]]


def comparison_page(runs: Sequence[Run]) -> str:
    """Return a self-contained page about several runs."""
    named = list(zip(unique_names(runs), runs, strict=True))
    parts = (
        f"<h1>{len(named)} runs</h1>",
        legend((run_class(place), name) for place, (name, _) in enumerate(named)),
        section("Results", _table(named, _rows(runs, _results))),
        section("Errors", _errors(named)),
        section(
            "Differences in configuration", _table(named, differences(runs, figures.configuration))
        ),
        section("Differences in environment", _table(named, differences(runs, _machine))),
        sections.curves(named),
        _mean_times(named),
        section("What would make them faster", _findings(named)),
    )
    return document("comparison of runs", filter(None, parts))


def unique_names(runs: Sequence[Run]) -> list[str]:
    """Return the runs' names, with their numbers where several have the same."""
    counts = Counter(run.name for run in runs)
    return [
        run.name if counts[run.name] == 1 else f"{run.name} ({place})"
        for place, run in enumerate(runs, start=1)
    ]


def differences(runs: Sequence[Run], pairs: Pairs) -> list[tuple[str, ...]]:
    """Return a row for each name with the values of all runs, where they are not the same."""
    return [row for row in _rows(runs, pairs) if len(set(row[1:])) > 1]


def _table(named: Sequence[tuple[str, Run]], rows: Iterable[Sequence[str]]) -> str:
    shown = list(rows)
    if not shown:
        return paragraph("None.", "soft")
    return table(("", *(name for name, _ in named)), shown, "compared")


def _rows(runs: Sequence[Run], pairs: Pairs) -> Iterator[tuple[str, ...]]:
    values = [dict(pairs(run)) for run in runs]
    for name in dict.fromkeys(name for each in values for name in each):
        yield name, *(each.get(name, "") or "–" for each in values)


def _results(run: Run) -> Iterator[tuple[str, str]]:
    yield "status", run.status
    yield from figures.key_figures(run)


def _errors(named: Iterable[tuple[str, Run]]) -> str:
    rows = [
        (name, str(event.step), event.message)
        for name, run in named
        for event in run.errors[-MOST_ERRORS:]
    ]
    return table(("run", "step", "error"), rows, "left") if rows else ""


def _machine(run: Run) -> Iterator[tuple[str, str]]:
    times = ("started", "last written")
    yield from (pair for pair in figures.environment(run) if pair[0] not in times)


def _mean_times(named: Iterable[tuple[str, Run]]) -> str:
    rows = [(name, _mean(run.breakdown)) for name, run in named if run.breakdown]
    bars = time_bars(rows)
    return section("Where the time of the mean rank goes", bars)


def _mean(times: Sequence[RankTime]) -> RankTime:
    sums = {part: sum(time.parts.get(part, 0.0) for time in times) for part in PARTS}
    return RankTime(0, {part: total / len(times) for part, total in sums.items() if total})


def _findings(named: Iterable[tuple[str, Run]]) -> str:
    rows = [
        (
            name,
            f"−{finding.gain:.0f}\N{NO-BREAK SPACE}%" if finding.gain else "–",
            finding.title,
            finding.advice,
        )
        for name, run in named
        for finding in findings(run)
    ]
    return table(("run", "gain", "cause", "advice"), rows, "left") if rows else ""
