"""The page of schedules: from a turned knob to the new picture, and the frames while it is panned.

    python benchmarks/studio_redraw.py

Prints a table for 32 ranks and 256 micro-batches. It needs Chromium, which runs without a screen
and draws on the processor. Measured in the page: a knob is turned, the server times the order
anew, the page draws it, and the browser has painted the frame.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple, cast

from playwright.sync_api import Page, sync_playwright
from rich.console import Console
from rich.table import Table

import stageline as sl
from stageline.studio.serve import Studio

RANKS, MICROBATCHES = 32, 256
FAMILIES = ("1f1b", "interleaved_1f1b", "zb_h1", "zbv")
TURNS, WARM = 25, 5  # turns that are measured, and turns before them
PAN_SECONDS = 2
WIDTH, HEIGHT = 1280, 900
# The time from the event of the slider until the frame with the new picture is painted: a message
# that is posted in a frame arrives after it.
TURN = """async (value) => {
  const slider = document.getElementById("forward-slider");
  const drawn = new Promise((resolve) => {
    document.getElementById("figures").addEventListener("drawn", resolve, { once: true });
  });
  const table = document.getElementById("summary");
  const before = table.textContent;
  const start = performance.now();
  slider.value = value;
  slider.dispatchEvent(new Event("input", { bubbles: true }));
  await drawn;
  await new Promise((resolve) => {
    const { port1, port2 } = new MessageChannel();
    port1.onmessage = resolve;
    port2.postMessage(null);
  });
  const end = performance.now();
  if (table.textContent === before) throw new Error("the picture is still the old one");
  return end - start;
}"""
# Drag the picture by a few pixels in every frame, and return the intervals between frames.
PAN = """async (seconds) => {
  const marks = document.querySelector(".marks");
  const { left, top } = marks.getBoundingClientRect();
  const send = (type, x) => marks.dispatchEvent(new PointerEvent(type, {
    clientX: left + x, clientY: top + 60, button: 0, pointerId: 1, bubbles: true,
  }));
  marks.setPointerCapture = () => {};  // only real pointers can be captured
  const times = [];
  send("pointerdown", 1000);
  await new Promise((resolve) => {
    const step = (now) => {
      times.push(now);
      send("pointermove", 1000 - 3 * times.length);
      if (now - times[0] < 1000 * seconds) requestAnimationFrame(step);
      else resolve();
    };
    requestAnimationFrame(step);
  });
  send("pointerup", 0);
  return times.slice(1).map((time, i) => time - times[i]);
}"""


@contextmanager
def studio_page() -> Iterator[tuple[Page, str]]:
    """Yield a page in a browser, and the address of a studio."""
    studio = Studio(Path(), port=0)
    threading.Thread(target=studio.run, daemon=True).start()
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))))
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-gpu"]
        browser = playwright.chromium.launch(executable_path=chromium, args=arguments)
        yield browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}), studio.address
        browser.close()
    studio.stop()


class Measured(NamedTuple):
    """Times in ms: of turns, and between frames while a wide and a close view are panned."""

    turns: list[float]
    wide: list[float]
    close: list[float]


def measured(page: Page, address: str, family: str) -> Measured:
    """Return the times of one schedule."""
    page.goto(f"{address}schedules?p={RANKS}&m={MICROBATCHES}&show={family}")
    page.locator("#summary tbody tr").wait_for()
    values = [1.05 + (turn % 10) / 20 for turn in range(WARM + TURNS)]
    turns = [cast("float", page.evaluate(TURN, value)) for value in values][WARM:]
    views = []
    for num_zooms in (4, 5):  # a fifth of the time, then so close that the names of actions fit
        for _ in range(num_zooms):
            page.click("#zoom-in")
        views.append(cast("list[float]", page.evaluate(PAN, PAN_SECONDS)))
    return Measured(turns, *views)


def main() -> None:
    table = Table(box=None, header_style="bold")
    table.add_column("schedule")
    columns = ("redrawn, ms", "slowest", "frame, ms", "slowest", "frames/s", "close: frames/s")
    for column in ("actions", *columns):
        table.add_column(column, justify="right")
    with studio_page() as (page, address):
        for family in FAMILIES:
            found = measured(page, address, family)
            rates = (1000 * len(frames) / sum(frames) for frames in (found.wide, found.close))
            numbers = (median(found.turns), max(found.turns), median(found.wide), max(found.wide))
            cells = (f"{number:.1f}" for number in (*numbers, *rates))
            table.add_row(family, str(num_actions(family)), *cells)
    Console(width=120).print(table)


def num_actions(family: str) -> int:
    """Return the number of actions in a picture."""
    schedule = sl.build_schedule(family, num_ranks=RANKS, num_microbatches=MICROBATCHES)
    return sum(map(len, schedule.actions))


if __name__ == "__main__":
    main()
