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
from typing import cast

from playwright.sync_api import Page, sync_playwright
from rich.console import Console
from rich.table import Table

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
  const start = performance.now();
  slider.value = value;
  slider.dispatchEvent(new Event("input", { bubbles: true }));
  await drawn;
  await new Promise((resolve) => {
    const { port1, port2 } = new MessageChannel();
    port1.onmessage = resolve;
    port2.postMessage(null);
  });
  return performance.now() - start;
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


def measured(page: Page, address: str, family: str) -> tuple[int, list[float], list[float]]:
    """Return the number of actions, the times of turns and the intervals of frames, in ms."""
    page.goto(f"{address}schedules?p={RANKS}&m={MICROBATCHES}&show={family}")
    page.locator("#summary tbody tr").wait_for()
    values = [1 + (turn % 10) / 20 for turn in range(WARM + TURNS)]
    turns = [cast("float", page.evaluate(TURN, value)) for value in values][WARM:]
    for _ in range(4):  # a fifth of the time is visible: labels do not fit yet
        page.click("#zoom-in")
    frames = cast("list[float]", page.evaluate(PAN, PAN_SECONDS))
    num_actions = RANKS * MICROBATCHES * {"1f1b": 2, "interleaved_1f1b": 4, "zb_h1": 3}.get(family, 6)
    return num_actions, turns, frames


def main() -> None:
    table = Table(box=None, header_style="bold")
    table.add_column("schedule")
    for column in ("actions", "redrawn, ms", "slowest", "frame, ms", "slowest", "frames/s"):
        table.add_column(column, justify="right")
    with studio_page() as (page, address):
        for family in FAMILIES:
            num_actions, turns, frames = measured(page, address, family)
            rate = 1000 * len(frames) / sum(frames)
            numbers = (median(turns), max(turns), median(frames), max(frames), rate)
            table.add_row(family, str(num_actions), *(f"{number:.1f}" for number in numbers))
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
