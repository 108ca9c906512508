"""What notebooks show of schedules, timelines, profiles, plans and pipelines."""

from __future__ import annotations

import re
from base64 import b64decode
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import stageline as sl
from stageline.planning.profiling.profile_result import LayerCost, Measurement

HOSTILE = "<script>alert('x')</script> & \"q\""
ESCAPED = "&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt;"


class Balanced(HTMLParser):
    """Raise unless every element that is opened is closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.opened: list[str] = []
        self.feed(html)
        assert self.opened == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:  # noqa: ARG002  the parser's
        assert tag in ("img", "pre", "p", "table", "thead", "tbody", "tr", "td", "th")
        self.opened += [tag] if tag != "img" else []

    def handle_endtag(self, tag: str) -> None:
        assert self.opened.pop() == tag


def shown(value: Any) -> str:
    html: str = value._repr_html_()
    Balanced(html)
    return html


def picture(html: str) -> str:
    """Return the SVG within an image, which has to be XML."""
    found = re.search(r'src="data:image/svg\+xml;base64,([^"]+)"', html)
    assert found
    text = b64decode(found[1]).decode()
    ElementTree.fromstring(text)
    return text


def test_a_schedule_shows_the_picture_of_its_simulation() -> None:
    schedule = sl.build_schedule("1f1b", num_ranks=3, num_microbatches=4)
    assert shown(schedule) == shown(sl.simulate(schedule))
    assert "makespan 18" in picture(shown(schedule))


def test_a_picture_is_an_image_whose_styles_stay_in_it() -> None:
    html = shown(sl.build_schedule("zbv", num_ranks=2, num_microbatches=4))
    assert "<style" not in html
    assert 'alt="zbv, 2 ranks, 4 micro-batches"' in html


def test_a_schedule_that_cannot_run_says_why() -> None:
    html = shown(sl.Schedule.from_text("0F0 0B0", "1B0 1F0"))
    assert "1B0 comes before 1F0, which it needs" in html


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(32, 256), (256, 16), (2, 3000)])
def test_a_large_schedule_is_drawn_coarsely_in_less_than_400_kilobytes(
    num_ranks: int, num_microbatches: int
) -> None:
    html = shown(sl.build_schedule("1f1b", num_ranks=num_ranks, num_microbatches=num_microbatches))
    assert len(html) < 400_000
    text = picture(html)
    actions = 2 * num_ranks * num_microbatches
    assert f"drawn coarsely: {actions:,} actions in cells of" in text
    assert ("192 further ranks are left out" in text) == (num_ranks == 256)


def test_a_huge_schedule_is_named_and_not_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stageline.schedules.schedule.MOST_SHOWN", 1000)
    html = shown(sl.build_schedule("gpipe", num_ranks=2, num_microbatches=400))
    assert "1,600 actions are too many to draw here" in html


def test_a_coarse_picture_has_each_kind_in_its_share() -> None:
    schedule = sl.build_schedule("gpipe", num_ranks=4, num_microbatches=200)
    text = picture(shown(sl.simulate(schedule, sl.Costs(forward=1, input_grad=1, weight_grad=1))))
    lane = text.split('class="lane"')[1]
    widths = {
        kind: sum(float(w) for w in re.findall(r"0h([\d.]+)v", path))
        for kind, path in re.findall(r'<path class="(\w)0" d="([^"]+)"', lane)
    }
    assert widths["B"] / widths["F"] == pytest.approx(2, rel=0.03)


def test_names_are_escaped() -> None:
    timeline = sl.simulate(sl.Schedule.from_text("0F0 0B0", name=HOSTILE))
    assert ESCAPED in shown(timeline)
    assert ESCAPED in picture(shown(timeline))


def test_a_timeline_without_actions_shows_itself() -> None:
    assert "timeline" in picture(shown(sl.Timeline(((), ()), (0, 1))))


def profile_of(names: list[str]) -> sl.Profile:
    layers = tuple(LayerCost(1e-3, 1e-3, 1e-3, 100, 100, 40, 0) for _ in names)
    return sl.Profile(tuple(names), (Measurement(1, layers, ()),), device=HOSTILE)


def test_a_profile_shows_fifty_layers_and_counts_the_others() -> None:
    html = shown(profile_of([HOSTILE, *(f"layer{n}" for n in range(1, 2000))]))
    assert html.count("<tr>") == 1 + 50 + 1
    assert "and 1,950 more layers" in html
    assert html.count(ESCAPED) == 2
    assert len(html) < 60_000


def test_a_plan_shows_its_table_and_notes() -> None:
    cluster = sl.Cluster(num_devices=2, memory="1GiB")
    plan = sl.plan(profile_of(["a", "b", "c", "d"]), cluster, batch_size=8, num_ranks=2)
    html = shown(plan)
    assert html.count("<tr>") == 2 + len(plan.others)
    assert plan.chosen.description in html
    assert f"layers by stage: {', '.join(map(str, plan.balance))}" in html
    assert "the cluster has no levels of links" in html
    many = replace(plan, others=plan.others[:1] * 500)
    assert f"and {501 - 50} more plans" in shown(many)


def test_a_pipeline_shows_its_stages() -> None:
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(5)])
    with sl.Pipeline(model, nn.functional.mse_loss, num_ranks=2, num_microbatches=2) as pipe:
        html = shown(pipe)
    assert "Sequential: 5 layers in 2 stages on 2 ranks, 1f1b, 2 micro-batches" in html
    assert "0 … 2 (3)" in html or "0 … 1 (2)" in html
    assert html.count("<tr>") == 1 + 2


@pytest.mark.parametrize(
    ("recompute", "note"),
    [
        ("never", ""),
        ("selective", "recomputation: selective"),
        (("always", "selective"), "recomputation by stage: always, selective"),
    ],
)
def test_a_pipeline_and_a_plan_say_what_is_recomputed(
    recompute: str | tuple[str, str], note: str
) -> None:
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    loss_fn = nn.functional.mse_loss
    with sl.Pipeline(model, loss_fn, num_ranks=2, num_microbatches=2, recompute=recompute) as pipe:
        for text in (shown(pipe), str(pipe)):
            assert note in text
            assert ("recomputation" in text) is bool(note)
    profile, cluster = profile_of(list("abcd")), sl.Cluster(2, "1GiB")
    plan = sl.plan(profile, cluster, batch_size=8, num_ranks=2, schedules=["1f1b"])
    modes = (recompute,) * 2 if isinstance(recompute, str) else recompute
    plan = replace(
        plan,
        recompute=tuple(mode != "never" for mode in modes),
        selective=tuple(mode == "selective" for mode in modes),
    )
    for text in (shown(plan), str(plan)):
        assert note in text
        assert ("recomputation" in text) is bool(note)


def test_a_pipeline_that_has_not_seen_a_batch_says_so() -> None:
    model = nn.TransformerEncoderLayer(8, 2)
    with sl.Pipeline(model, nn.functional.mse_loss, num_ranks=2, num_microbatches=2) as pipe:
        assert "its layers are known after the first batch" in shown(pipe)


def test_a_measured_timeline_has_the_reasons_of_idle_time() -> None:
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    with sl.Pipeline(model, nn.functional.mse_loss, num_ranks=2, num_microbatches=2) as pipe:
        with pipe.trace() as trace:
            pipe.step(torch.ones(4, 4), torch.zeros(4, 4))
        html = shown(trace.timeline)
    assert "imbalance" in html
    assert "rank 1" in html
