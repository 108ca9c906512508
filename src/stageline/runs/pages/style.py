"""Colours and layout of a report, light and dark; from 480 pixels on it is readable."""

from __future__ import annotations

from stageline.report.palette import COLOURS
from stageline.runs.breakdown import PARTS
from stageline.schedules.action import Kind

# Okabe and Ito's colours for work, greys for waiting. A test compares each with each, and with
# light and dark pages, as they are seen with and without colour blindness. The studio has the same.
COLOUR_OF_PART = {
    "forward": COLOURS[Kind.F],
    "recomputation": "#56B4E9",
    "backward": COLOURS[Kind.B],
    "input gradient": COLOURS[Kind.I],
    "weight gradient": COLOURS[Kind.W],
    "transfer": "#D869B1",
    "imbalance": "#787878",
    "bubble": "#CDCDCD",
    "idle": "#CDCDCD",
    "host": "#3A328B",
    "optimizer": "#554B35",
    "data": "#E5D400",
    "saving": "#734625",
}
COLOURS_OF_RUNS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A5C3A")
OTHER_RUN = "#999999"  # from the eighth run on


def part_class(part: str) -> str:
    """Return the CSS class of a part of a rank's time."""
    return "part-" + part.replace(" ", "-")


def run_class(number: int) -> str:
    """Return the CSS class of a run among several."""
    return f"run-{min(number, len(COLOURS_OF_RUNS))}"


def _coloured() -> str:
    colours = [(part_class(part), COLOUR_OF_PART[part]) for part in PARTS]
    colours += [(run_class(n), c) for n, c in enumerate((*COLOURS_OF_RUNS, OTHER_RUN))]
    return "\n".join(
        f".{css}{{fill:{colour};background:{colour};--stroke:{colour}}}" for css, colour in colours
    )


LAYOUT = """
:root{color-scheme:light dark;--ink:#1D1D1F;--soft:#5F6368;--line:#D9DCE0;--paper:#FFF;
  --panel:#F6F7F8;--bad:#B3261E;--good:#1B6E3C;--idle:#EFEFEF}
@media (prefers-color-scheme:dark){:root{--ink:#E8EAED;--soft:#A5ABB3;--line:#3C4148;
  --paper:#15171A;--panel:#1F2226;--bad:#FF8A80;--good:#81C995;--idle:#2A2E33}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1240px;padding:1.25rem 1rem 3rem;color:var(--ink);
  background:var(--paper);font:15px/1.5 system-ui,"Helvetica Neue",Helvetica,Arial,sans-serif;
  overflow-wrap:anywhere}
h1{font-size:1.5rem;line-height:1.25;margin:.25rem 0}
h2{font-size:1.1rem;margin:0 0 .6rem}
h3{font-size:.95rem;margin:.9rem 0 .3rem}
section{border-top:1px solid var(--line);padding-top:1rem;margin-top:1.5rem}
p{margin:.3rem 0}.soft,figcaption{color:var(--soft)}.bad{color:var(--bad)}.good{color:var(--good)}
.tiles{display:flex;flex-wrap:wrap;gap:.6rem;margin:1rem 0 0}
.tiles div{background:var(--panel);border-radius:8px;padding:.5rem .8rem;flex:1 1 8rem}
.tiles dt{color:var(--soft);font-size:.85rem}
.tiles dd{margin:0;font-size:1.15rem;font-weight:600;font-variant-numeric:tabular-nums}
.findings{list-style:none;margin:0;padding:0;display:grid;gap:.6rem}
.findings li{background:var(--panel);border-radius:8px;padding:.6rem .8rem;display:grid;
  grid-template-columns:4.5rem 1fr;gap:.2rem .8rem}
.findings .note{color:var(--soft);font-weight:400;font-size:.9rem}
.findings b{font-size:1.15rem;font-variant-numeric:tabular-nums;white-space:nowrap}
.findings strong::first-letter{text-transform:uppercase}
.findings p{margin:.1rem 0}
.events{margin:0;padding-left:1.2rem}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr));gap:1rem}
figure{margin:0}figcaption{font-size:.85rem}
.charts figure{background:var(--panel);border-radius:8px;padding:.6rem .8rem}
.chart{display:block;width:100%;height:auto;font-size:12px}
.chart text{fill:var(--soft)}.chart .grid{stroke:var(--line);fill:none}
.chart .curve{fill:none;background:none;stroke:var(--stroke);stroke-width:1.8;
  stroke-linejoin:round}
.chart .point{stroke:none}
.wide{overflow-x:auto}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:.9rem;
  overflow-wrap:normal}
th,td{padding:.25rem .8rem;text-align:right;border-bottom:1px solid var(--line);
  vertical-align:top}
th{font-weight:600;white-space:nowrap}th:first-child,td:first-child{text-align:left;padding-left:0}
.pairs td:last-child,.left td,.left th{text-align:left}
.pairs td:last-child{overflow-wrap:anywhere}.left td:last-child{min-width:12rem}
.numbers td{white-space:nowrap}
.left td:first-child,.compared td:first-child{min-width:6.5rem}
.pairs td:first-child{color:var(--soft);white-space:nowrap}
.columns{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr));
  gap:0 2rem}
.bars{width:100%}.bars td{border:0;padding:.12rem .4rem .12rem 0;vertical-align:middle;
  white-space:nowrap}
.bars td:nth-child(2){width:100%;padding-right:.6rem}
.bars svg{display:block;width:100%;height:18px;background:var(--panel);border-radius:3px}
.dense svg{height:12px}.dense td{font-size:.78rem;padding-top:.04rem;padding-bottom:.04rem}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:.2rem 1rem;margin:.4rem 0;padding:0;
  font-size:.85rem;color:var(--soft)}
.legend i{display:inline-block;width:.85em;height:.85em;border-radius:2px;margin-right:.4em;
  vertical-align:-.08em}
.picture{overflow-x:auto}
.picture svg{display:block;max-width:100%;height:auto}
.tall svg{max-width:none}
.picture svg>rect{fill:none}.picture .idle{fill:var(--idle)}.picture .grid{stroke:var(--line)}
.picture text:not(.labels text){fill:var(--soft)}
.picture text.title:not(.labels text){fill:var(--ink)}
details{margin-top:.6rem}summary{cursor:pointer;color:var(--soft)}
@media (max-width:1000px){.picture svg{max-width:none}}
@media (max-width:600px){.findings li{grid-template-columns:1fr}th,td{padding:.25rem .5rem}}
@media print{section{break-inside:avoid}}
"""
DARK = """
@media (prefers-color-scheme:dark){
  .chart .curve,.chart .point,.legend [class^=run]{filter:brightness(1.5)}
  .part-bubble,.part-idle{fill:#474C54;background:#474C54}
  .part-imbalance{fill:#7B818A;background:#7B818A}}
"""
STYLE = LAYOUT + _coloured() + DARK
