"""Settings of Sphinx for the site that `make docs` builds: the pages of this folder, as they are.

The pages stay readable in a viewer of repositories, so Sphinx gets here what it wants otherwise:

- A page called `index.md` is a list of links under headings; the table of contents is made of it.
  Pages that no list names are added at its end.
- Pages outside of this folder are copied to `_pages/`, and links are changed to lead there.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from sphinx.application import Sphinx

HERE = Path(__file__).parent
ROOT, COPIES = HERE.parent, HERE / "_pages"
sys.path.insert(0, str(ROOT / "src"))

from stageline import __version__  # noqa: E402  of this tree, not of an installed one

project = "Stageline"
version = release = __version__
copyright = "the authors of Stageline, Apache-2.0"  # noqa: A001  the name that Sphinx reads
extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
default_role = "literal"  # docstrings write `name` for code

nitpicky = True
# Types of other projects have no page here, and neither have those that are not public.
nitpick_ignore_regex = [(r"py:.*", r"(?!stageline\.).*"), (r"py:.*", r"stageline\.\w+\..*")]
myst_heading_anchors = 4
suppress_warnings = ["myst.header"]  # a page may go from its title to headings of the third level

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
maximum_signature_line_length = 90
add_module_names = False

html_theme = "furo"
html_title = f"Stageline {version}"
html_static_path = ["theme"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_search_summary = False  # it is fetched, which browsers refuse for local files
html_show_sphinx = False
highlight_language = "none"  # of blocks that name none: they are commands and what they print
html_theme_options: dict[str, list[str]] = {"top_of_page_buttons": []}
pygments_style, pygments_dark_style = "friendly", "github-dark"

ELSEWHERE = [
    *(ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "benchmarks").rglob("*.md")),
    *sorted((ROOT / "experiments").rglob("*.md")),
]
HEADING = re.compile(r"^## (.+)$", re.MULTILINE)
LISTED = re.compile(r"^- \[[^]]+\]\(([\w/.]+)\.md\)", re.MULTILINE)
LINK = re.compile(r"(?<=\]\()([^)\s#]+)")


def copy_pages(_app: Sphinx, _config: object) -> None:
    """Copy the pages outside of this folder, so that Sphinx finds them."""
    wanted = {COPIES / page.relative_to(ROOT) for page in ELSEWHERE}
    for copy in set(COPIES.rglob("*.md")) - wanted:  # of pages that are gone
        copy.unlink()
    for page in ELSEWHERE:
        copy, text = COPIES / page.relative_to(ROOT), f"---\norphan: true\n---\n{page.read_text()}"
        if not copy.exists() or copy.read_text() != text:  # else nothing is rendered again
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(text)


def adapt(_app: Sphinx, page: str, source: list[str]) -> None:
    """Change the links of a page to where their targets are in the site, and add contents."""
    folder = (HERE / page).parent
    original = ROOT / folder.relative_to(COPIES) if folder.is_relative_to(COPIES) else folder

    def target(link: re.Match[str]) -> str:
        path = Path(os.path.normpath(original / link[1]))
        if not path.is_file():
            return link[1]
        found = COPIES / path.relative_to(ROOT) if path in ELSEWHERE else path
        return os.path.relpath(found, folder)

    source[0] = LINK.sub(target, source[0])
    if page.endswith("index"):
        source[0] += _contents(source[0], folder)


def _contents(text: str, folder: Path) -> str:
    """Return tables of contents, one for each section of an index that lists pages."""
    _, *parts = HEADING.split(text)
    sections = {
        name: LISTED.findall(part) for name, part in zip(parts[::2], parts[1::2], strict=True)
    }
    listed = {page for pages in sections.values() for page in pages}
    sections["More"] = sorted({page.stem for page in folder.glob("*.md")} - listed - {"index"})
    return "".join(_toctree(name, pages) for name, pages in sections.items() if pages)


def _toctree(name: str, pages: list[str]) -> str:
    return "\n".join(["", "```{toctree}", ":hidden:", f":caption: {name}", "", *pages, "```", ""])


def setup(app: Sphinx) -> None:
    app.connect("config-inited", copy_pages)
    app.connect("source-read", adapt)
