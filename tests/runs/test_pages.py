"""Pages and Markdown about runs: complete, self-contained, and harmless whatever a folder holds."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from tests.runs.folders import line, timeline, write_run

import stageline as sl
from stageline.runs.pages.comparison import comparison_page
from stageline.runs.pages.markdown import markdown
from stageline.runs.pages.page import run_page
from stageline.runs.pages.report import report
from stageline.runs.read import read_run
from stageline.runs.records import PlannedCosts
from stageline.runs.run import Run

EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'|`&amp;[a](https://x.y) @me #1"
SECTIONS = [
    *("What would make it faster", "Errors and warnings", "Curves"),
    *("Where each rank's time goes", "Timeline", "Predicted and measured", "Memory"),
    *("Checkpoints", "How it ran"),
]


class Elements(HTMLParser):
    """The elements of a page, with their attributes, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str]] = []
        self.headings: list[str] = []
        self.text: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag == "h2":
            self.headings.append("")

    def handle_data(self, data: str) -> None:
        self.text.append(data)
        if self.headings and not self.headings[-1]:
            self.headings[-1] = data


def full_run(folder: Path, num_ranks: int = 2, **fields: Any) -> Run:
    """A run that has something to say in every section."""
    measured = timeline(num_ranks, 4, forward=1.0)
    one = (0.0011,) * num_ranks
    costs = {"forward": one, "input_grad": one, "weight_grad": one}
    plan = PlannedCosts("1f1b", seconds=0.03, costs=costs, peak_memory=(2.0**30,) * num_ranks)
    events = (
        ("started", 0, ""),
        ("warning", 3, "the learning rate is high"),
        ("checkpoint saved", 50, "step-00000050"),
        ("finished", 100, ""),
    )
    place = write_run(folder, measured, events=events, **{"plan": plan} | fields)
    (place / "step-00000050").mkdir()
    return read_run(place)


@pytest.mark.parametrize("num_ranks", [2, 4, 32])
def test_page_has_all_sections(num_ranks: int, tmp_path: Path) -> None:
    page = Elements(run_page(full_run(tmp_path / "run", num_ranks)))
    assert page.headings == SECTIONS
    text = " ".join(page.text)
    assert "In the folder now: step 50." in text
    assert "warning at step 3: the learning rate is high" in text
    assert f"rank {num_ranks - 1}" in text


def test_page_asks_for_nothing_and_runs_no_script(tmp_path: Path) -> None:
    page = run_page(full_run(tmp_path / "run"))
    found = Elements(page)
    assert found.tags.isdisjoint(
        {"script", "link", "iframe", "object", "embed", "img", "form", "a"}
    )
    names = {name for name, _ in found.attributes}
    assert names.isdisjoint({"src", "href", "style", "action"})
    assert not any(name.startswith("on") for name in names)
    assert "default-src 'none'" in page
    assert "url(" not in page
    assert page.replace("http://www.w3.org/2000/svg", "").count("://") == 0


def test_hostile_text_is_shown_and_is_not_html(tmp_path: Path) -> None:
    names: dict[str, Any] = {
        "schedule": EVIL,
        "optimizer": EVIL,
        "options": {EVIL: EVIL},
        "layers": (EVIL,) * 2,
    }
    run = full_run(tmp_path / "<script>evil<img src=x>", **names)
    events = tuple(replace(event, message=EVIL, kind="warning") for event in run.events)
    hostile = replace(run, events=events, notes=(EVIL,))
    unplanned, other = replace(hostile, predicted=None), replace(run, name="other")
    for page in (run_page(hostile), run_page(unplanned), comparison_page([hostile, other])):
        found = Elements(page)
        assert found.tags.isdisjoint({"script", "img", "a"})
        assert "<script>" in "".join(found.text)


def test_markdown_shows_hostile_text_as_it_is(tmp_path: Path) -> None:
    hostile = full_run(tmp_path / "run", schedule=EVIL, backend=EVIL)
    text = markdown([replace(hostile, name=EVIL)])
    for forbidden in ("<script", "](", "@me", "://", "`", "<img"):
        assert forbidden not in text
    rows = [row for row in text.splitlines() if row.startswith("|")]
    assert all(row.count("|") == 3 for row in rows)


def test_markdown_is_short_and_says_what_to_do(tmp_path: Path) -> None:
    text = markdown([full_run(tmp_path / "run")])
    assert len(text.splitlines()) < 30
    assert "| time of a step | 320 ms |" in text
    assert "- -13 %" in text
    assert "another schedule" in text


def test_several_runs_are_compared_by_what_differs(tmp_path: Path) -> None:
    runs = [
        full_run(tmp_path / "a" / "run"),
        full_run(tmp_path / "b" / "run", optimizer="SGD"),
    ]
    text = Elements(comparison_page(runs)).text
    assert {"run (1)", "run (2)", "SGD", "AdamW"} <= set(text)
    assert "batch_norm" not in text
    shown = markdown(runs)
    assert "| optimizer | AdamW | SGD |" in shown
    assert "| schedule |" not in shown


def test_comparison_says_what_ended_a_run(tmp_path: Path) -> None:
    events = (("started", 0, ""), ("failed", 7, "OSError: no such image"))
    failed = read_run(write_run(tmp_path / "failed", events=events))
    page = Elements(comparison_page([full_run(tmp_path / "run"), failed]))
    assert "Errors" in page.headings
    assert "OSError: no such image" in page.text


def test_run_that_has_only_started_has_a_page(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", events=(("started", 0, ""),))
    for name in ("timeline.json", "metrics.jsonl"):
        (folder / name).unlink()
    page = Elements(run_page(read_run(folder)))
    assert page.headings == ["How it ran"]
    assert "unfinished: it is running, or was killed" in page.text


def test_run_of_one_step_that_failed_says_where(tmp_path: Path) -> None:
    events = (("started", 0, ""), ("failed", 1, "StageError: rank 1 failed in layer 'b'"))
    run = read_run(write_run(tmp_path / "run", None, [line(1)], events))
    text = " ".join(Elements(run_page(run)).text)
    assert "failed at step 1: StageError: rank 1 failed in layer 'b'" in text
    assert "failed at step 1" in markdown([run])


def test_page_of_many_ranks_stays_small(tmp_path: Path) -> None:
    page = run_page(read_run(write_run(tmp_path / "run", timeline(500, 2))))
    assert len(page) < 1_500_000


def test_loss_that_was_not_finite_is_said_so(tmp_path: Path) -> None:
    lines = [line(10), line(20, loss=float("nan")), line(30, loss=float("inf"))]
    run = read_run(write_run(tmp_path / "run", lines=lines))
    text = " ".join(Elements(run_page(run)).text)
    assert "The loss was NaN or infinite in 2 reports, first at step 20." in text
    assert "not finite" in markdown([run])


def test_report_replaces_a_report_and_nothing_else(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    path = folder / "report.html"
    assert report([folder]).files == (path,)
    report([folder])
    path.write_text("<html>my own page</html>")
    with pytest.raises(sl.ReportError, match="exists and is not a report: give another file"):
        report([folder])
    assert path.read_text() == "<html>my own page</html>"
    report([folder], tmp_path / "other.html", tmp_path / "other.md")
    report([folder], tmp_path / "other.html", tmp_path / "other.md")
    with pytest.raises(sl.ReportError, match="is not a report"):
        report([folder], tmp_path / "run" / "run.json")


def test_link_in_the_place_of_a_report_is_not_followed(tmp_path: Path) -> None:
    folder, elsewhere = write_run(tmp_path / "run"), tmp_path / "precious"
    for name in ("report.html", "report.html.partial"):
        (folder / name).symlink_to(elsewhere)
    with pytest.raises(sl.ReportError, match="exists and is not a report"):
        report([folder])
    (folder / "report.html").unlink()
    report([folder])
    assert not elsewhere.exists()
    assert not (folder / "report.html.partial").exists()


def test_ticks_of_a_flat_curve_are_told_apart(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", lines=[line(1, loss=97.19), line(9, loss=97.20)]))
    figure = run_page(run).partition("<figcaption>loss")[2].partition("</svg>")[0]
    ticks = re.findall(r'text-anchor="end">([^<]+)<', figure)
    assert len(set(ticks)) == len(ticks) >= 3


def test_recomputation_is_shown_by_stage(tmp_path: Path) -> None:
    modes = ("always",) * 3 + ("selective",) * 20 + ("never",)
    run = read_run(write_run(tmp_path / "run", recompute=modes))
    expected = "3 × always, 20 × selective, never"
    assert expected in run_page(run)
    assert f"| recomputation | {expected} |" in markdown([run])
