"""A studio and a page of it that several tests share, since each takes a second to start."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Page
from tests.studio.conftest import SECONDS, Watched

from stageline.studio.serve import Studio

REFUSED = "the server responded with a status of 422"  # Chromium logs each refused request


@contextmanager
def running_studio(folder: Path) -> Iterator[str]:
    """Give the address of a studio that runs."""
    studio = Studio(folder, port=0)
    thread = threading.Thread(target=studio.run, daemon=True)
    thread.start()
    yield studio.address
    studio.stop()
    thread.join(SECONDS)
    assert not thread.is_alive()


@contextmanager
def watched_page(browser: Browser) -> Iterator[Page]:
    """Give a page that may log that a request was refused, but nothing else."""
    watched = Watched()
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.set_default_timeout(1000 * SECONDS)
    watched.watch(page)
    yield page
    context.close()
    assert [text for text in watched.errors if REFUSED not in text] == []
    assert watched.strangers == []


def overflow(page: Page) -> int:
    """Return by how many pixels the page is wider than the window."""
    found: int = page.evaluate("document.documentElement.scrollWidth - innerWidth")
    return found
