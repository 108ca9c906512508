"""The pictures of the page of schedules: hover, click, step, zoom, and move actions."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from playwright.sync_api import expect
from tests.studio.schedules.conftest import SchedulesPage

from stageline import Costs, Schedule, build_schedule, simulate
from stageline.errors import ScheduleError
from stageline.schedules.check import check

END = 33.0  # of 1F1B with 4 ranks and 8 micro-batches
DEADLOCK = Schedule.from_text(  # 1F1B on 2 ranks, with 1F2 before 1B0, and 0F2 still behind 0B0
    "0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1F2 1B0 1F1 1B1 1B2"
)


def tip(schedules: SchedulesPage) -> list[str]:
    return schedules.page.locator("#tip").inner_text().splitlines()


def painted(schedules: SchedulesPage, name: str) -> int:
    """Return how many pixels are marked above a picture, after the next frame."""
    return int(
        schedules.picture(name).evaluate(
            """async (canvas) => {
              await new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve)));
              const copy = new OffscreenCanvas(canvas.width, canvas.height)
                .getContext("2d", { willReadFrequently: true });
              copy.drawImage(canvas, 0, 0);
              const { data } = copy.getImageData(0, 0, canvas.width, canvas.height);
              return new Uint32Array(data.buffer).filter((pixel) => pixel !== 0).length;
            }"""
        )
    )


def running_at(time: float) -> str:
    """Return what the page says about a time of 1F1B with 4 ranks and 8 micro-batches."""
    timeline = simulate(build_schedule("1f1b", num_ranks=4, num_microbatches=8))
    found = (
        next((str(s.action) for s in row if s.start <= time < s.end), "idle")
        for row in timeline.spans
    )
    return f"1f1b at {time:g}: {' · '.join(found)}"


def test_hovering_tells_what_an_action_waited_for_and_marks_the_path(
    schedules: SchedulesPage,
) -> None:
    schedules.open(show="1f1b")
    before = painted(schedules, "1f1b")
    picture = schedules.picture("1f1b")
    picture.hover(position=schedules.place("1f1b", 1, 8.5, END))
    assert tip(schedules) == [
        "1B0: backward, micro-batch 0",
        "stage 1 on rank 1",
        "from 8 to 10",
        "needs 2B0, which ends at 8",
    ]
    of_action = painted(schedules, "1f1b")
    assert of_action > before
    picture.hover(position=schedules.place("1f1b", 0, 6.0, END))
    assert tip(schedules) == ["rank 0 waits from 4 to 10", "needs 1B0, which ends at 10"]
    assert painted(schedules, "1f1b") > of_action  # the critical path
    schedules.page.mouse.move(0, 0)
    expect(schedules.page.locator("#tip")).to_be_hidden()


def test_a_click_shows_the_dependencies_of_an_action(schedules: SchedulesPage) -> None:
    schedules.open(show="zbv")
    end = 25.5
    schedules.picture("zbv").click(position=schedules.place("zbv", 3, 1.75, end))
    expect(schedules.page.locator("#selected")).to_have_text(
        "3F0: forward, micro-batch 0, stage 3 on rank 3, from 1.5 to 2, "
        "needs 2F0, which ends at 1.5"
    )
    marked = painted(schedules, "zbv")
    schedules.keys("zbv", "Enter")  # hides them again
    assert painted(schedules, "zbv") < marked


def test_the_path_of_the_page_is_critical_in_the_simulator(schedules: SchedulesPage) -> None:
    schedules.open()
    costs = {"forward": 0.7, "input_grad": 1.1, "transfer": 0.3}
    for name in ("1f1b", "zbv", "dualpipe_v", "interleaved_1f1b", "gpipe"):
        names = schedules.page.evaluate(
            """async (body) => {
              const { decodeTimelines } = await import("./static/schedules/decode.js");
              const path = await import("./static/schedules/timeline.js");
              const { post } = await import("./static/shared/requests.js");
              const response = await post("api/schedules/pictures", body);
              const [timeline] = decodeTimelines(await response.arrayBuffer());
              return path.pathTo(timeline, path.lastAction(timeline))
                .map((action) => path.nameOf(timeline, action)).reverse();
            }""",
            {"schedules": [{"family": name}], "costs": costs},
        )
        schedule = build_schedule(name, num_ranks=4, num_microbatches=8)
        of_rank = Costs.of_a_rank(schedule.num_stages // 4, **costs)
        timeline = simulate(schedule, of_rank)
        spans = {str(s.action): (rank, s) for rank, row in enumerate(timeline.spans) for s in row}
        path = [spans[each] for each in names]
        assert path[0][1].start == 0.0
        assert path[-1][1].end == timeline.makespan
        for (rank, span), (next_rank, following) in pairwise(path):
            delay = 0.0 if rank == next_rank else 0.3
            assert following.start == span.end + delay


def test_time_is_stepped_through(schedules: SchedulesPage) -> None:
    schedules.open(show="1f1b", time=8)
    running = schedules.page.locator("#running")
    expect(running).to_have_text(running_at(8))
    schedules.page.click("#step-on")
    expect(running).to_have_text(running_at(9))
    schedules.page.click("#step-back")
    expect(schedules.page.locator("#time-text")).to_have_text("8")
    schedules.page.locator("#time").fill("32")
    expect(running).to_have_text(running_at(32))
    schedules.address_has("time=32")
    play = schedules.page.locator("#play")
    play.click()
    schedules.wait("document.querySelector('#time').value > 32")
    play.click()
    expect(play).to_have_attribute("aria-pressed", "false")


def test_pictures_are_zoomed_and_panned(schedules: SchedulesPage) -> None:
    schedules.open(show="1f1b")
    view = r"view=([\d.]+)\+([\d.]+)"

    def visible(condition: str) -> tuple[float, float]:
        schedules.wait(f"/{view}/.test(location.search) && {condition}")
        found = re.search(view, schedules.page.url)
        assert found
        return float(found[1]), float(found[2])

    schedules.page.click("#zoom-in")
    start, stop = visible("true")
    assert stop - start == pytest.approx(END / 1.5)
    box = schedules.picture("1f1b").bounding_box()
    assert box is not None
    schedules.page.mouse.move(box["x"] + 600, box["y"] + 40)
    schedules.page.mouse.down()
    schedules.page.mouse.move(box["x"] + 500, box["y"] + 40, steps=3)
    schedules.page.mouse.up()
    moved, _ = visible(f"!location.search.includes('={start}+')")
    assert moved == pytest.approx(start + 100 * (stop - start) / (box["width"] - 44), rel=1e-3)
    schedules.page.keyboard.down("Control")
    schedules.page.mouse.wheel(0, -200)
    schedules.page.keyboard.up("Control")
    closer = visible(f"!location.search.includes('={moved}+')")
    assert closer[1] - closer[0] < 0.9 * (stop - start)
    schedules.page.click("#fit")
    schedules.wait("!location.search.includes('view')")


def test_an_action_is_dragged_to_another_place(schedules: SchedulesPage) -> None:
    schedules.open(show="gpipe")
    schedules.page.click("#edit")
    schedules.drag("gpipe", 3, (3.5, 5.6), END)  # 3F0 behind 3F1 and 3F2
    expect(schedules.figure("gpipe").locator(".verdict")).to_have_text(
        "The checker finds nothing wrong with this order. The makespan was 33, is 34 (+3.0 %)."
    )
    schedules.address_has("show=gpipe*3.0.2")
    schedules.figure("gpipe").get_by_text("Reset").click()
    expect(schedules.figure("gpipe").locator(".verdict")).to_be_empty()
    expect(schedules.figure("gpipe").locator("h2")).to_have_text("gpipe")


def test_dragging_into_a_deadlock_shows_what_the_checker_says(schedules: SchedulesPage) -> None:
    schedules.open(show="1f1b", p=2, m=3)
    end = 12.0
    schedules.page.click("#edit")
    schedules.drag("1f1b", 1, (7.5, 2.3), end)  # 1F2 behind 1F0, before 1B0
    with pytest.raises(ScheduleError) as caught:
        check(DEADLOCK)
    assert "ranks 0, 1 wait for each other" in str(caught.value)
    verdict = schedules.figure("1f1b").locator(".verdict")
    expect(verdict).to_contain_text("ranks 0, 1 wait for each other")
    assert schedules.verdict("1f1b") == str(caught.value)
    assert schedules.measures("1f1b edited")[0] == "deadlock"
    schedules.picture("1f1b").hover(position=schedules.place("1f1b", 1, 3.5, end))
    assert tip(schedules)[-1] == "never runs: the order does not complete"
    schedules.address_has("show=1f1b*1.4.1")
    url = schedules.page.url
    schedules.figure("1f1b").get_by_text("Undo").click()
    expect(verdict).to_be_empty()
    assert schedules.measures("1f1b")[0] == "12"
    schedules.page.goto(url)  # the link holds the deadlock
    expect(verdict).to_contain_text("ranks 0, 1 wait for each other")


def test_the_keyboard_does_all_of_it(schedules: SchedulesPage) -> None:
    schedules.open(show="1f1b")
    selected = schedules.page.locator("#selected")
    for keys, name in (
        (("ArrowRight",), "0F0"),
        (("ArrowRight", "ArrowRight"), "0F2"),
        (("ArrowLeft",), "0F1"),
        (("ArrowDown",), "1F0"),
        (("End",), "1B7"),
        (("ArrowUp",), "0B7"),
        (("Home",), "0F0"),
    ):
        schedules.keys("1f1b", *keys)
        expect(selected).to_contain_text(name)
    verdict = schedules.figure("1f1b").locator(".verdict")
    schedules.keys("1f1b", "Alt+ArrowRight")
    expect(verdict).to_contain_text("finds nothing wrong")
    expect(selected).to_contain_text("0F0")
    schedules.keys("1f1b", "Control+z")
    expect(verdict).to_be_empty()
    schedules.keys("1f1b", "+", "+", "Shift+ArrowRight")
    schedules.address_has("view=")
    schedules.keys("1f1b", "0", "Escape")
    schedules.wait("!location.search.includes('view')")
    expect(selected).to_be_empty()


def test_every_control_is_reached_with_the_tab_key(schedules: SchedulesPage) -> None:
    schedules.open(show="1f1b")
    schedules.page.evaluate(
        "for (const each of document.querySelectorAll('details')) each.open = true"
    )
    controls = schedules.page.evaluate(
        """() => [...document.querySelectorAll("main :is(button, input, select, textarea, canvas)")]
          .filter((each) => each.checkVisibility() && !each.disabled && each.className !== "lanes")
          .map((each) => each.tabIndex >= 0 && (each.labels?.length > 0 || each.textContent !== ""
            || each.ariaLabel !== null))"""
    )
    assert len(controls) > 40
    assert all(controls)  # and each has a name


def test_the_orders_of_several_mini_batches_are_not_edited(schedules: SchedulesPage) -> None:
    schedules.open(show="pipedream*0.0.1", minibatches=2)
    message = "only a single mini-batch can be edited: set mini-batches to 1"
    assert schedules.verdict("pipedream") == message
    schedules.figure("pipedream").get_by_text("Reset").click()
    schedules.page.locator("#legend >> text=optimizer step").wait_for()
