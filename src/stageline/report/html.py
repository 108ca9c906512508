"""Write a timeline as a self-contained HTML page: a picture with zoom and drag, and a table."""

from __future__ import annotations

from collections.abc import Iterator

from stageline.report.summary import heading, number, percent
from stageline.report.svg.drawing import svg, xml
from stageline.report.timeline import Timeline
from stageline.schedules.placement import stages_by_rank

STYLE = """
:root{color-scheme:light}
body{margin:1.5rem auto;max-width:1800px;padding:0 1.5rem;color:#222;background:#FFF;
  font:14px/1.5 "Helvetica Neue",Helvetica,Arial,sans-serif}
figure{margin:0;position:relative}
figure svg{display:block;width:100%;height:auto;cursor:grab;touch-action:pan-y}
figure svg:active{cursor:grabbing}
nav{position:absolute;top:.5rem;right:.5rem;display:flex;gap:.25rem}
button{min-width:2rem;height:2rem;border:1px solid #CCC;border-radius:4px;background:#FFF;
  color:#444;font:inherit;cursor:pointer}
button:hover{background:#F3F3F3}
figcaption{color:#666;margin:.25rem 0 1.5rem}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{padding:.2rem 1rem;text-align:right}
th{font-weight:600;border-bottom:2px solid #444}
td{border-bottom:1px solid #E5E5E5}
"""

# Zooming and dragging only change the viewBox of the picture.
SCRIPT = """
const picture = document.querySelector("figure svg");
const { width: fullWidth, height: fullHeight } = picture.viewBox.baseVal;
let view = { x: 0, y: 0, zoom: 1 };

function show(x, y, zoom) {
  zoom = Math.min(Math.max(zoom, 1), 64);
  const width = fullWidth / zoom, height = fullHeight / zoom;
  x = Math.min(Math.max(x, 0), fullWidth - width);
  y = Math.min(Math.max(y, 0), fullHeight - height);
  view = { x, y, zoom };
  picture.setAttribute("viewBox", `${x} ${y} ${width} ${height}`);
}

function zoomBy(factor, across = 0.5, down = 0.5) {
  const zoom = Math.min(Math.max(view.zoom * factor, 1), 64);
  const shrink = 1 / view.zoom - 1 / zoom;
  show(view.x + across * fullWidth * shrink, view.y + down * fullHeight * shrink, zoom);
}

picture.addEventListener("wheel", event => {
  if (!event.ctrlKey && !event.metaKey) return;
  event.preventDefault();
  const box = picture.getBoundingClientRect();
  const across = (event.clientX - box.left) / box.width;
  zoomBy(Math.exp(-event.deltaY / 200), across, (event.clientY - box.top) / box.height);
}, { passive: false });

picture.addEventListener("pointermove", event => {
  if (event.buttons !== 1) return;
  const unit = fullWidth / view.zoom / picture.getBoundingClientRect().width;
  show(view.x - event.movementX * unit, view.y - event.movementY * unit, view.zoom);
});

picture.addEventListener("dblclick", () => show(0, 0, 1));
document.querySelector("#in").onclick = () => zoomBy(1.5);
document.querySelector("#out").onclick = () => zoomBy(1 / 1.5);
document.querySelector("#all").onclick = () => show(0, 0, 1);
"""

LEGIBLE_WHEN_ZOOMED = 0.5  # font size in pixels
COLUMNS = ("rank", "stages", "busy", "idle", "span", "peak activations", "peak memory")


def page(timeline: Timeline) -> str:
    """Return the page of a timeline."""
    return html_document(heading(timeline), svg(timeline, LEGIBLE_WHEN_ZOOMED), _table(timeline))


def html_document(title: str, picture: str, table: str = "") -> str:
    """Return a page with a picture, and a table below it."""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{xml(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<figure>
{picture}<nav>
<button id="in" title="zoom in">+</button>
<button id="out" title="zoom out">−</button>
<button id="all" title="show all">all</button>
</nav>
<figcaption>Ctrl + wheel to zoom, drag to move, double-click to show all.</figcaption>
</figure>
{table}
<script>{SCRIPT}</script>
</body>
</html>
"""


def _table(timeline: Timeline) -> str:
    head = "".join(f"<th>{column}</th>" for column in COLUMNS)
    held = stages_by_rank(timeline.placement, timeline.num_ranks, timeline.replicas)
    rows = "\n".join(
        f"<tr>{''.join(f'<td>{cell}</td>' for cell in _cells(timeline, rank, stages))}</tr>"
        for rank, stages in enumerate(held)
    )
    return f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table>"


def _cells(timeline: Timeline, rank: int, stages: tuple[int, ...]) -> Iterator[str]:
    """Yield the cells of a row, one for each of `COLUMNS`."""
    busy = timeline.busy[rank]
    yield str(rank)
    yield ", ".join(map(str, stages))
    yield number(busy)
    yield percent(1 - busy / timeline.makespan if timeline.makespan else 0.0)
    yield number(timeline.rank_spans[rank])
    for peaks in (timeline.peak_activations, timeline.peak_memory):
        yield number(peaks[rank]) if peaks else "–"
