"""Draw what a step queues on the streams of two devices, and which events order it.

python docs/stream_order.py docs/pictures/streams.svg

The streams are those of the simulated accelerator, so the picture shows what the code does.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import stageline as sl
from stageline.runtime import devices
from stageline.runtime.accelerators.access_order import Event, SimulatedStream
from stageline.runtime.accelerators.simulation import Simulation

LEFT, PITCH, UNIT, HEIGHT, TOP = 210, 46, 44, 26, 56
MIDDLE = HEIGHT // 2 + 4  # where a line of text is in a lane
TIP = (
    '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
    'orient="auto"><path d="M0 0L8 4L0 8z" fill="#D55E00"/></marker>'
)
LANES = (
    "the caller's stream",
    "compute of rank 0",
    "copies from rank 0 to rank 1",
    "copies from rank 1 to rank 0",
    "compute of rank 1",
)
CALLER, BEGIN, END = LANES[0], "begin", "end"
COLOURS = {"F": "#0072B2", "B": "#009E73", "SEND": "#CC79A7", "begin": "#666", "end": "#666"}
LENGTHS = {"F": 1.6, "B": 3.2, "SEND": 0.8, "begin": 1.0, "end": 1.0}
STYLE = (
    'text{font:12px "Helvetica Neue",Helvetica,Arial,sans-serif;fill:#222}'
    ".lane{text-anchor:end}.box{text-anchor:middle;fill:#FFF;font-size:11px}"
    ".title{font-size:15px;font-weight:600}"
    ".event{stroke:#D55E00;stroke-width:1.4;fill:none;marker-end:url(#tip)}"
)


@dataclass(eq=False)
class Box:
    """What one action queues on a stream."""

    lane: int
    action: str
    waits_for: list[Box] = field(default_factory=list)
    start: float = 0.0

    @property
    def kind(self) -> str:
        return next(kind for kind in (BEGIN, END, "SEND", "B", "F", "") if kind in self.action)

    @property
    def end(self) -> float:
        return self.start + LENGTHS.get(self.kind, 0.6)


class Recording(Simulation):
    """Devices that remember what was queued. State: the boxes, and events not yet used."""

    def __init__(self) -> None:
        super().__init__()
        self.boxes: list[Box] = []
        self.events: dict[int, tuple[Event, Box | None]] = {}
        self.waits: dict[str, list[Box]] = {}  # of the next box, by stream
        RECORDED.append(self)

    def queue(
        self,
        what: str,
        reads: Iterable[Tensor],
        writes: Iterable[Tensor],
        stream: SimulatedStream | None = None,
    ) -> None:
        super().queue(what, reads, writes, stream)
        name = (stream or self.current()).name
        action = str(self.thread.action()) if self.thread.action else ""
        if name != CALLER:
            self.add(name, action)

    def add(self, name: str, action: str) -> Box | None:
        """Return the box of an action on a stream, which begins unless it is the latest there."""
        with self.lock:
            last = self.last_on(name)
            waits = self.waits.pop(name, [])
            if name in LANES and (last is None or last.action != action):
                last = Box(LANES.index(name), action, waits)
                self.boxes.append(last)
            elif last is not None:
                last.waits_for += waits
        return last

    def last_on(self, name: str) -> Box | None:
        return next((b for b in reversed(self.boxes) if LANES[b.lane] == name), None)

    def record_event(self, device: object) -> Event:
        event = super().record_event(device)
        name = self.current(device).name
        box = self.add(name, BEGIN) if name == CALLER else self.last_on(name)
        self.events[id(event)] = event, box
        return event

    def wait_event(self, device: object, event: Event) -> None:
        super().wait_event(device, event)
        _, box = self.events[id(event)]
        name = self.current(device).name
        if box is not None:
            self.waits.setdefault(name, []).append(box)
        if name == CALLER:
            self.add(name, END)


RECORDED: list[Recording] = []


class Arrow(NamedTuple):
    """An event: what is waited for, and what waits."""

    first: Box
    second: Box


def recorded_boxes() -> list[Box]:
    """Return what the second step of a small pipeline queues; the first one observes layers."""
    vars(devices)["Simulation"] = Recording
    blocks = [nn.Linear(8, 8) for _ in range(4)]
    batch = torch.randn(6, 8), torch.randn(6, 8)
    sizes: dict[str, Any] = {"num_ranks": 2, "num_microbatches": 3, "backend": "threads"}
    options = sl.Options(check_streams=True)
    with sl.Pipeline(nn.Sequential(*blocks), nn.functional.mse_loss, **sizes, options=options) as p:
        p.step(*batch)
        (recording,) = RECORDED
        recording.boxes.clear()
        recording.waits.clear()
        p.step(*batch)
    place(recording.boxes)
    return [box for box in recording.boxes if box.kind]


def place(boxes: list[Box]) -> None:
    """Let each box begin when those before it on its stream, and those it waits for, have ended."""
    free = [0.0] * len(LANES)
    for box in boxes:
        box.waits_for = [each for each in box.waits_for if each in boxes and each.kind]
        if box.kind:
            box.start = max([free[box.lane], *(each.end for each in box.waits_for)])
            free[box.lane] = box.end


def svg(boxes: list[Box]) -> str:
    """Return the picture."""
    width = LEFT + UNIT * max(box.end for box in boxes) + 20
    height = TOP + PITCH * len(LANES)
    size = f'width="{width:.0f}" height="{height}" viewBox="0 0 {width:.0f} {height}"'
    title = "1F1B on two devices: what each stream runs, and the events that order it"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
        f"<style>{STYLE}</style>",
        f"<defs>{TIP}</defs>",
        '<rect width="100%" height="100%" fill="#FFF"/>',
        f'<text class="title" x="{LEFT}" y="24">{title}</text>',
        *_lanes(width),
        *(_box(box) for box in boxes),
        *_arrows(boxes),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _lanes(width: float) -> Iterator[str]:
    for number, name in enumerate(LANES):
        y = TOP + PITCH * number
        yield f'<text class="lane" x="{LEFT - 12}" y="{y + MIDDLE}">{escape(name)}</text>'
        yield _rectangle(LEFT, y, width - LEFT - 10, "#F1F1F1")


def _box(box: Box) -> str:
    x, y, width = LEFT + UNIT * box.start, TOP + PITCH * box.lane, UNIT * (box.end - box.start)
    name = escape(box.action.replace("SEND_", ""))
    label = f'<text class="box" x="{x + width / 2:.1f}" y="{y + MIDDLE}">{name}</text>'
    return _rectangle(x, y, width - 1, COLOURS[box.kind]) + label


def _rectangle(x: float, y: float, width: float, colour: str) -> str:
    size = f'width="{width:.1f}" height="{HEIGHT}"'
    return f'<rect x="{x:.1f}" y="{y:.1f}" {size} rx="3" fill="{colour}"/>'


def _arrows(boxes: list[Box]) -> Iterator[str]:
    arrows = {Arrow(first, box) for box in boxes for first in box.waits_for}
    for first, second in sorted(arrows, key=lambda arrow: (arrow.second.start, arrow.second.lane)):
        if first.lane == second.lane:
            continue
        down = second.lane > first.lane
        x1, x2 = LEFT + UNIT * first.end - 2, LEFT + UNIT * second.start + 4
        y1 = TOP + PITCH * first.lane + (HEIGHT if down else 0)
        y2 = TOP + PITCH * second.lane + (0 if down else HEIGHT)
        yield f'<path class="event" d="M{x1:.1f} {y1}L{x2:.1f} {y2}"/>'


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(svg(recorded_boxes()))
