from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page
from tests.studio.sharing import running_studio, watched_page


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder whose runs are shown; each test has names of its own."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="package")
def viewer(folder: Path) -> Iterator[str]:
    """The address of a studio that the tests of this package share."""
    with running_studio(folder) as address:
        yield address


@pytest.fixture(scope="package")
def shared_page(browser: Browser) -> Iterator[Page]:
    with watched_page(browser) as page:
        yield page
