"""The page of schedules in one browser window, which the tests of a file share."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from playwright.sync_api import Browser, Locator, Page
from tests.studio.conftest import SECONDS, Watched

from stageline.studio.serve import Studio

REFUSED = "status of 422"  # Chromium logs each request that the server cannot answer
GUTTER, RIGHT, AXIS = 34, 10, 24  # as in layout.js
LANE_MIDDLE, PITCH = 15, 56  # of few ranks


@dataclass(frozen=True)
class SchedulesPage:
    """The page of schedules, by what a user sees of it."""

    page: Page
    address: str

    def open(self, **state: object) -> None:
        """Load the page with this state in its address."""
        self.page.goto(f"{self.address}schedules?{urlencode(state)}")
        self.page.locator("#summary tbody tr").first.wait_for()

    def wait(self, condition: str) -> None:
        """Wait until an expression of JavaScript is true."""
        self.page.wait_for_function(f"() => {condition}")

    def measures(self, name: str) -> list[str]:
        """Return the row of a schedule in the table of measures, without its name."""
        head = self.page.locator(f"th:text-is('{name}')")
        row = self.page.locator("#summary tbody tr").filter(has=head)
        return row.locator("td").all_inner_texts()

    def wait_for_makespan(self, name: str, makespan: str) -> None:
        cell = f"//tr[th='{name}']/td[1][.='{makespan}']"
        self.page.locator(f"#summary >> xpath={cell}").wait_for()

    def figure(self, name: str) -> Locator:
        return self.page.locator(f"section[data-name='{name}']")

    def verdict(self, name: str) -> str:
        return self.figure(name).locator(".verdict").inner_text()

    def picture(self, name: str) -> Locator:
        return self.figure(name).locator(".marks")

    def place(self, name: str, rank: int, time: float, end: float) -> Any:
        """Return the position of a time on a rank, in a picture that shows times up to `end`."""
        box = self.picture(name).bounding_box()
        assert box is not None
        x = GUTTER + time / end * (box["width"] - GUTTER - RIGHT)
        return {"x": x, "y": AXIS + rank * PITCH + LANE_MIDDLE}

    def drag(self, name: str, rank: int, times: tuple[float, float], end: float) -> None:
        """Drag from one time of a rank to another."""
        box = self.picture(name).bounding_box()
        assert box is not None
        (x0, y0), (x1, y1) = (
            (box["x"] + at["x"], box["y"] + at["y"])
            for at in (self.place(name, rank, time, end) for time in times)
        )
        mouse = self.page.mouse
        mouse.move(x0, y0)
        mouse.down()
        mouse.move((x0 + x1) / 2, y1, steps=2)
        mouse.move(x1, y1)
        mouse.up()

    def keys(self, name: str, *keys: str) -> None:
        self.picture(name).focus()
        for key in keys:
            self.page.keyboard.press(key)

    def address_has(self, part: str) -> None:
        """Wait until the address, without its escapes, contains a text."""
        self.wait(f"decodeURIComponent(location.search).includes({part!r})")


@pytest.fixture(scope="module")
def shared_studio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a studio for all tests of a file."""
    runs: Path = tmp_path_factory.mktemp("runs")
    running = Studio(runs, port=0)
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    yield running.address
    running.stop()
    thread.join(SECONDS)


@pytest.fixture(scope="module")
def window(browser: Browser) -> Iterator[tuple[Page, Watched]]:
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page, watched = context.new_page(), Watched()
    page.set_default_timeout(1000 * SECONDS)
    watched.watch(page)
    yield page, watched
    context.close()


@pytest.fixture
def schedules(shared_studio: str, window: tuple[Page, Watched]) -> Iterator[SchedulesPage]:
    """The page of schedules. A test fails if it logs an error, or asks another machine."""
    page, watched = window
    yield SchedulesPage(page, shared_studio)
    errors = [error for error in watched.errors if REFUSED not in error]
    strangers = watched.strangers[:]
    watched.errors.clear()
    watched.strangers.clear()
    assert errors == []
    assert strangers == []
