"""The site is built without a warning, its links lead somewhere, and it loads no foreign file."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from docs import commands

import stageline

ROOT = Path(__file__).parents[2]
PAGES = sorted([*(ROOT / "docs").glob("*.md"), *(ROOT / "docs").glob("reference/*.md")])
LOADED = {"src", "srcset", "data", "poster"}  # attributes whose address a browser fetches


class Page(HTMLParser):
    """What a page of the site refers to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = {""}
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors.add(values.get("id", ""))
        self.fetched += [value for name, value in values.items() if name in LOADED]
        if tag == "link" and "canonical" not in values.get("rel", ""):
            self.fetched.append(values["href"])
        elif tag == "a":
            self.links.append(values.get("href", ""))


@cache
def page_at(path: Path) -> Page:
    return Page(path.read_text())


def broken_links(site: Path) -> Iterator[str]:
    """Yield each link within the site whose page or anchor does not exist."""
    for path in sorted(site.rglob("*.html")):
        for link in page_at(path).links + page_at(path).fetched:
            address = urlsplit(link)
            if address.scheme or address.netloc:
                continue
            target = (path.parent / unquote(address.path)).resolve() if address.path else path
            is_page = target.suffix == ".html" and target.is_file()
            if not target.exists() or (
                is_page and unquote(address.fragment) not in page_at(target).anchors
            ):
                yield f"{path.relative_to(site)}: {link}"


def fetched_from_elsewhere(site: Path) -> Iterator[str]:
    for path in sorted(site.rglob("*.html")):
        for address in page_at(path).fetched:
            if urlsplit(address).netloc:
                yield f"{path.relative_to(site)}: {address}"
    for path in [*site.rglob("*.css"), *site.rglob("*.svg")]:
        for address in re.findall(
            r"(?:@import|url\()\s*[\"']?((?:https?:)?//[^\"')]+)", path.read_text()
        ):
            yield f"{path.relative_to(site)}: {address}"


def without_code(text: str) -> str:
    """Return a page without its blocks of code, in which comments look like headings."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def headings(text: str) -> set[str]:
    """Return the anchors that viewers of repositories give to headings."""
    titles = re.findall(r"^#+ (.+)$", without_code(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_anchors_of_page_are_headings(page: Path) -> None:
    links = re.findall(r"\]\(([^):\s]*)#([^)\s]+)\)", page.read_text())
    found = {name: headings((page.parent / (name or page.name)).read_text()) for name, _ in links}
    assert [link for link in links if link[1] not in found[link[0]]] == []


def test_reference_of_the_command_line_is_what_the_commands_say() -> None:
    assert commands.PAGE.read_text() == commands.page()


def test_reference_has_every_public_name() -> None:
    text = "".join(path.read_text() for path in (ROOT / "docs" / "reference").iterdir())
    names = re.findall(r"^\.\. auto\w+:: stageline\.(\w+)$", text, re.MULTILINE)
    assert sorted(names) == sorted(stageline.__all__)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_site_is_built_without_a_warning_and_is_whole(tmp_path: Path) -> None:
    pytest.importorskip("sphinx", reason="`pip install stageline[docs]` brings it")
    options = ["--nitpicky", "--fail-on-warning", "--keep-going", "--quiet", "-b", "html"]
    built = subprocess.run(
        [sys.executable, "-m", "sphinx", *options, ROOT / "docs", tmp_path / "site"],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert (built.returncode, built.stderr) == (0, "")
    site = tmp_path / "site"
    assert list(broken_links(site)) == []
    assert list(fetched_from_elsewhere(site)) == []
    reference = {
        anchor for path in site.glob("reference/*.html") for anchor in page_at(path).anchors
    }
    assert {f"stageline.{name}" for name in stageline.__all__} <= reference
    front = {urlsplit(link).path for link in page_at(site / "index.html").links}
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")}
    assert {f"{name}.html" for name in pages - {"index"}} <= front


def test_broken_links_and_foreign_files_are_found(tmp_path: Path) -> None:
    (tmp_path / "here.html").write_text('<h1 id="top"></h1><a href="there.html#end">x</a>')
    (tmp_path / "there.html").write_text(
        '<a href="here.html#top">x</a><a href="gone.html">x</a><script src="//cdn.example/a.js">'
        '</script><a href="https://example.org">x</a>'
    )
    (tmp_path / "site.css").write_text("@import url('https://fonts.example/a.css');")
    assert [*broken_links(tmp_path)] == ["here.html: there.html#end", "there.html: gone.html"]
    assert [*fetched_from_elsewhere(tmp_path)] == [
        "there.html: //cdn.example/a.js",
        "site.css: https://fonts.example/a.css",
    ]
