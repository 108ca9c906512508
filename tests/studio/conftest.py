"""A studio that runs, and a browser that looks at it, if there is one on this machine."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, sync_playwright

from stageline.studio.access import LOOPBACK
from stageline.studio.serve import Studio

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
SECONDS = 15.0  # until a page that does not answer is an error


@pytest.fixture
def runs_folder(tmp_path: Path) -> Path:
    """The folder whose runs the studio shows; tests put runs there."""
    folder = tmp_path / "runs"
    folder.mkdir()
    return folder


@pytest.fixture
def studio(runs_folder: Path) -> Iterator[str]:
    """The address of a studio that runs, with its token and a slash at its end."""
    running = Studio(runs_folder, port=0)
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    yield running.address
    running.stop()
    thread.join(SECONDS)
    assert not thread.is_alive()


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("there is no browser: install Debian's chromium to test the studio's pages")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@dataclass
class Watched:
    """What a page did that it must not: errors in its console, and requests to other machines."""

    errors: list[str] = field(default_factory=list)
    strangers: list[str] = field(default_factory=list)

    def watch(self, page: Page) -> None:
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", self._read)
        page.on("request", lambda request: self._check(request.url))

    def _read(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(message.text)

    def _check(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("data", "blob", "about") and parts.hostname not in LOOPBACK:
            self.strangers.append(url)


@pytest.fixture
def watched() -> Watched:
    return Watched()


@pytest.fixture
def page(browser: Browser, watched: Watched) -> Iterator[Page]:
    """An empty page. A test fails if it logs an error, or asks another machine for something."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.set_default_timeout(1000 * SECONDS)
    watched.watch(page)
    yield page
    context.close()
    assert watched.errors == []
    assert watched.strangers == []
