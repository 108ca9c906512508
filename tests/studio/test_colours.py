"""Text can be read on its background, and the colours of actions told apart by everyone.

Contrast is that of WCAG 2.2; 4.5 is its least for text. Colour blindness is simulated with the
matrices of Machado, Oliveira and Fernandes (2009), "A Physiologically-based Model for Simulation of
Color Vision Deficiency", for complete protanopia, deuteranopia and tritanopia, on linear RGB.
Distances are CIE 1976 ΔE in L*a*b*, in which 2.3 is just noticeable.
"""

from __future__ import annotations

import re
from itertools import combinations, product

import numpy as np
import numpy.typing as npt
import pytest

from stageline.report.palette import COLOURS, OTHER_COLOUR, ink, shade
from stageline.runs.breakdown import PARTS
from stageline.runs.pages.style import COLOUR_OF_PART, DARK
from stageline.schedules.action import Kind
from stageline.studio.app import STATIC

Numbers = npt.NDArray[np.float64]
READABLE = 4.5  # WCAG 1.4.3
VISIBLE = 3.0  # WCAG 1.4.11, of what is no text
DISTINCT = 10.0  # four times what is just noticeable
THEME = (STATIC / "shared" / "theme.css").read_text()
RUNS = (STATIC / "runs" / "page.css").read_text()
SCHEMES = {"light": THEME.split("@media")[0], "dark": THEME.split("@media")[1]}
ON_BACKGROUNDS = [
    *(("--text", page) for page in ("--page", "--panel")),
    *(("--quiet", page) for page in ("--page", "--panel")),
    ("--accent", "--page"),
    ("--on-accent", "--accent"),
    ("--error", "--error-page"),
    ("--error", "--page"),
    ("--page", "--text"),  # the tip beside the pointer
]
VISION = {
    "usual": np.eye(3),
    "protanopia": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
    "deuteranopia": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
    "tritanopia": np.array(
        [
            [1.255528, -0.076749, -0.178779],
            [-0.078411, 0.930809, 0.147602],
            [0.004733, 0.691367, 0.303900],
        ]
    ),
}
XYZ = np.array(  # of linear sRGB, white at D65
    [
        [0.4124564, 0.3575761, 0.1804375],
        [0.2126729, 0.7151522, 0.0721750],
        [0.0193339, 0.1191920, 0.9503041],
    ]
)


def linear(colour: str) -> Numbers:
    """Return linear RGB from 0 to 1."""
    values = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def contrast(first: str, second: str) -> float:
    light, dark = sorted((float(XYZ[1] @ linear(c)) for c in (first, second)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def lab(rgb: Numbers) -> Numbers:
    x, y, z = np.cbrt(XYZ @ np.clip(rgb, 0, 1) / (XYZ @ np.ones(3)))  # of bright colours
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def distance(first: str, second: str, vision: str) -> float:
    seen = [lab(VISION[vision] @ linear(colour)) for colour in (first, second)]
    return float(np.linalg.norm(seen[0] - seen[1]))


def colours_of(scheme: str) -> dict[str, str]:
    return dict(re.findall(r"(--[\w-]+): (#[0-9a-f]{6})", SCHEMES[scheme]))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("text", "background"), ON_BACKGROUNDS)
def test_text_can_be_read(scheme: str, text: str, background: str) -> None:
    colours = colours_of(scheme)
    assert contrast(colours[text], colours[background]) >= READABLE


@pytest.mark.parametrize("kind", [*COLOURS, Kind.STEP])
def test_names_of_actions_can_be_read_on_every_chunk(kind: Kind) -> None:
    shades = [shade(kind, chunk, 4) for chunk in range(4)]
    assert min(contrast(ink(colour), colour) for colour in shades) >= READABLE


@pytest.mark.parametrize("vision", VISION)
def test_kinds_of_actions_are_told_apart(vision: str) -> None:
    pairs = combinations([*COLOURS.values(), OTHER_COLOUR], 2)
    assert min(distance(first, second, vision) for first, second in pairs) >= DISTINCT


def run_colours(scheme: str) -> dict[str, str]:
    """The colours of the page of runs; what the dark scheme does not set is as in the light one."""
    light, dark = RUNS.split("@media")[:2]
    found = re.findall(r"(--[\w-]+): (#[0-9a-f]{6})", light if scheme == "light" else light + dark)
    return dict(found) | colours_of(scheme)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_text_on_the_page_of_runs_can_be_read(scheme: str) -> None:
    colours = run_colours(scheme)
    for text, page in product(("--good", "--warning"), ("--page", "--panel")):
        assert contrast(colours[text], colours[page]) >= READABLE
    assert not re.findall(r"[{ ;]color: var\(--run", RUNS)


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_curves_of_runs_are_told_apart(scheme: str, vision: str) -> None:
    colours = run_colours(scheme)
    runs = [colours[f"--run-{number}"] for number in range(8)]
    assert min(contrast(run, colours["--panel"]) for run in runs) >= VISIBLE
    assert min(distance(*pair, vision) for pair in combinations(runs, 2)) >= DISTINCT


def test_actions_of_runs_have_the_colours_and_inks_of_pictures() -> None:
    colours = run_colours("light")
    names = {"F": "forward", "B": "backward", "I": "input-grad", "W": "weight-grad"}
    for kind, colour in COLOURS.items():
        assert colours[f"--{names[kind.value]}"] == colour.lower()
        shown = colours["--ink-on-forward" if kind is Kind.F else "--ink"]
        assert shown == ink(colour).lower()


def part_colours(scheme: str) -> dict[str, str]:
    """The colours of where a rank's time goes, in a report. Idle time is a bubble not explained."""
    colours = {part: colour.lower() for part, colour in COLOUR_OF_PART.items() if part != "idle"}
    if scheme == "dark":
        for part, colour in re.findall(r"\.part-(\w+)[^{]*\{fill:(#\w{6})", DARK):
            colours[part] = colour.lower()
    return colours


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_parts_of_a_ranks_time_are_told_apart(scheme: str, vision: str) -> None:
    pages = [colours_of(scheme)[name] for name in ("--page", "--panel")]
    parts = part_colours(scheme).values()
    pairs = [*combinations(parts, 2), *product(parts, pages)]
    assert min(distance(*pair, vision) for pair in pairs) >= DISTINCT


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_studio_shows_parts_in_the_colours_of_reports(scheme: str) -> None:
    rule = r"\.part-(\d+) \{ background: (#\w{6})"
    rules = re.findall(rule, RUNS)[: None if scheme == "dark" else len(PARTS)]
    shown = {PARTS[int(number)]: colour for number, colour in rules}
    assert {part: shown[part] for part in part_colours(scheme)} == part_colours(scheme)


def test_contrast_is_that_of_the_standard() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.005)  # known to fail barely
    assert lab(linear("#ffffff")) == pytest.approx([100, 0, 0], abs=1e-6)
    assert lab(linear("#ff0000")) == pytest.approx([53.24, 80.09, 67.20], abs=0.01)
