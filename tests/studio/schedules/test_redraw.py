"""The page of schedules keeps up with its user, also for 32 ranks and 256 micro-batches."""

from __future__ import annotations

from statistics import median

import pytest
from benchmarks.studio_redraw import FAMILIES, measured
from playwright.sync_api import Page

MOST_MS = 100.0  # from a turned knob to the new picture
FRAME_MS = 1000 / 60


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_large_picture_follows_a_slider_and_the_pointer(
    studio: str, page: Page, family: str
) -> None:
    found = measured(page, studio, family)
    assert min(found.turns) < MOST_MS  # of a machine that others use, too
    assert median(found.wide) < 1.1 * FRAME_MS
    assert median(found.close) < 1.1 * FRAME_MS
