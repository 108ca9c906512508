"""The gallery has every family, with its picture as it is drawn, and formulas that are true."""

from __future__ import annotations

import re
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from docs.gallery import FOLDER, draw

import stageline as sl
from stageline import cli
from stageline.report.timeline import Timeline
from stageline.schedules.families.registry import FAMILIES

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "gallery.md"
ROW = re.compile(r"^\| ([a-z].*?) \| `(.*?)` \| (?:`(.*?)`|always) \|$", re.MULTILINE)
SECTION = re.compile(r"^## ([a-z0-9_]+)\n(.*?)(?=^## )", re.MULTILINE | re.DOTALL)
SECTIONS = dict(SECTION.findall(PAGE.read_text()))
RANKS, PER_RANK, MORE, CHUNKS = (1, 2, 4, 5, 6), (1, 2, 3), (0, 1), (2, 4)
TIMES = [(1, 1, 1), (4, 4, 2), (8, 7, 6)]  # of F, I and W


def test_every_family_has_a_section_with_a_picture_formulas_and_a_paper() -> None:
    assert sorted(SECTIONS) == sorted(sl.schedule_names())
    for name, text in SECTIONS.items():
        assert f"(pictures/gallery/{name}.svg)" in text
        measures = " ".join(row[0] for row in ROW.findall(text))
        assert "idle time" in measures
        assert "activations" in measures
        assert re.search(r"\b[Uu]se it\b|The default", text)
        assert "https://arxiv.org/abs/" in text


def test_pictures_are_those_that_the_command_draws(tmp_path: Path) -> None:
    draw(tmp_path)
    drawn = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert drawn == {path.name: path.read_text() for path in FOLDER.iterdir()}


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/schedules.md"])
def test_pictures_with_a_command_below_are_what_it_draws(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (ROOT / page).read_text()
    captions = re.findall(r"\]\(([\w/]+\.svg)\)\n\n<sub>`(stageline draw [^`]+)`", text)
    assert captions
    monkeypatch.chdir(tmp_path)
    for picture, command in captions:
        monkeypatch.setattr("sys.argv", command.split())
        with pytest.raises(SystemExit):
            cli.main()
        drawn = (tmp_path / Path(picture).name).read_text()
        assert drawn == ((ROOT / page).parent / picture).read_text()


@pytest.mark.parametrize("family", SECTIONS)
def test_formulas_are_what_the_simulator_finds(family: str) -> None:
    rows = ROW.findall(SECTIONS[family])
    checked: Counter[str] = Counter()
    for sizes in cases(family):
        timeline = simulated(family, sizes)
        for measure, formula, condition in rows:
            if not condition or eval(condition, dict(sizes)):
                stated = float(eval(formula, dict(sizes)))
                found = measured(timeline, measure, sizes)
                is_less = measure.endswith("at most") and found < stated
                assert is_less or found == pytest.approx(stated, rel=1e-9, abs=1e-9), sizes
                checked[measure] += 1
    assert [row[0] for row in rows if checked[row[0]] < 9] == []


def cases(family: str) -> list[dict[str, int]]:
    """Return sizes and times of a rank's share to try."""
    options = FAMILIES[family].options
    chunks = CHUNKS if "chunks_per_rank" in options else (FAMILIES[family].chunks,)
    least = 2 if family == "dualpipe_v" else 1
    is_slow = "costs" in options or not FAMILIES[family].is_synchronous  # searched, or long
    times = TIMES[:2] if is_slow else TIMES
    ranks = RANKS[:4] if is_slow else RANKS
    pairs = [(p, p * n + more) for p, n, more in product(ranks, PER_RANK, MORE) if n >= least]
    if family == "pipedream":
        pairs += [(p, 1) for p in RANKS]
    return [
        {"p": p, "m": m, "v": v, "F": f, "I": i, "W": w}
        for (p, m), v, (f, i, w) in product(pairs, chunks, times)
    ]


def measured(timeline: Timeline, measure: str, sizes: dict[str, int]) -> float:
    """Return what a row of the page is about."""
    if measure.startswith("activations"):
        return max(timeline.peak_activations)
    if measure == "versions of a stage's weights":
        weights = sl.Costs(activation=0, parameters=1)
        return max(sl.simulate(timeline.schedule, weights).peak_memory)
    if measure == "idle time between fill and drain":
        return 1 - min(timeline.steady_busy)
    work = sizes["m"] * (sizes["F"] + sizes["I"] + sizes["W"])
    longest = timeline.makespan if measure == "idle time of a step" else max(timeline.rank_spans)
    return longest - work


def simulated(family: str, sizes: dict[str, int]) -> Timeline:
    options: dict[str, Any] = {}
    if "chunks_per_rank" in FAMILIES[family].options:
        options["chunks_per_rank"] = sizes["v"]
    costs = sl.Costs.of_a_rank(
        sizes["v"], forward=sizes["F"], input_grad=sizes["I"], weight_grad=sizes["W"]
    )
    if family in ("zb_1p", "zb_2p"):
        options["costs"] = costs
    schedule = sl.build_schedule(
        family, num_ranks=sizes["p"], num_microbatches=sizes["m"], **options
    )
    return sl.simulate(schedule, costs)
