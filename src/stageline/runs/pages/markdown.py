"""Write runs as Markdown for a pull request: a table, differences, findings and errors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from stageline.runs.findings.findings import findings
from stageline.runs.pages import figures
from stageline.runs.pages.comparison import differences, unique_names
from stageline.runs.run import Run

MARK = "<!-- stageline report -->"
MOST_FINDINGS = 5  # of a run
MOST_ERRORS = 3
SHORT = 200  # characters of an error
SPECIAL = frozenset("\\`*_{}[]<>()#+!|~@:&$")


def markdown(runs: Sequence[Run]) -> str:
    """Return Markdown about one run, or about several beside each other."""
    names = unique_names(runs)
    lines = [MARK, "", *_table(["", *names], _results(runs))]
    if len(runs) > 1 and (rows := differences(runs, figures.configuration)):
        lines += ["", "Differences in configuration:", "", *_table(["", *names], rows)]
    for name, run in zip(names, runs, strict=True):
        prefix = f"**{plain(name)}**: " if len(runs) > 1 else ""
        lines += ["", *_found(run, prefix)]
    return "\n".join(lines).rstrip() + "\n"


def plain(text: str) -> str:
    """Return text that Markdown shows as it is: no formatting, HTML, links or mentions.

    >>> plain("a|b <i> @me")
    'a&#124;b &#60;i&#62; &#64;&#8203;me'
    """
    found = []
    for character in text:
        shown = f"&#{ord(character)};" if character in SPECIAL else character
        found.append(shown + "&#8203;" if character in "@#:" else shown)
    return "".join(found)


def _results(runs: Sequence[Run]) -> Iterator[Sequence[str]]:
    values = [{"status": figures.status(run)} | dict(figures.key_figures(run)) for run in runs]
    if len(runs) == 1:
        wanted = (
            "schedule",
            "ranks",
            "micro-batches",
            "layers of stages",
            "recomputation",
            "backend",
        )
        made = dict(figures.configuration(runs[0]))
        values[0] |= {name: made.get(name, "") for name in wanted}
    for name in dict.fromkeys(name for each in values for name in each):
        yield [name, *(each.get(name, "") for each in values)]


def _found(run: Run, prefix: str) -> Iterator[str]:
    found = findings(run)[:MOST_FINDINGS]
    if found:
        yield f"{prefix}What would make it faster:"
        yield ""
    for finding in found:
        yield f"- {plain(str(finding).strip())}"
    for event in run.errors[-MOST_ERRORS:]:
        yield f"- {prefix}{event.kind} at step {event.step}: {plain(event.message[:SHORT])}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield _row(head)
    yield _row(["---"] * len(head), escaped=False)
    yield from map(_row, rows)


def _row(cells: Sequence[str], *, escaped: bool = True) -> str:
    return f"| {' | '.join(plain(cell) if escaped else cell for cell in cells)} |"
