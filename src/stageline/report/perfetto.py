"""Write a timeline as a trace for ui.perfetto.dev and chrome://tracing (Trace Event Format, JSON).

A timeline may use any unit of time, but a trace uses microseconds: one unit is shown as one
millisecond.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

from stageline.report.memory import memory_steps
from stageline.report.palette import NAMES, letter
from stageline.report.spans import Span
from stageline.report.timeline import Timeline
from stageline.schedules.action import NO_VERSION, WHOLE_BATCH, Action, Kind

Event = dict[str, object]

NANOSECONDS_PER_UNIT = 1_000_000
# the kind of message that an action sends and receives
MESSAGES = {Kind.F: Kind.SEND_F, Kind.I: Kind.SEND_B, Kind.B: Kind.SEND_B}
PROCESS = 1  # Perfetto treats process and thread 0 as the kernel's idle ones


def trace(timeline: Timeline) -> str:
    """Return the trace of a timeline as JSON."""
    events = [*_names(timeline), *_actions(timeline), *_memory(timeline), *_flows(timeline)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":"))


def _names(timeline: Timeline) -> Iterator[Event]:
    yield _metadata("process_name", 0, name=timeline.name or "timeline")
    for rank in range(timeline.num_ranks):
        yield _metadata("thread_name", rank, name=f"rank {rank}")
        yield _metadata("thread_sort_index", rank, sort_index=rank)


def _actions(timeline: Timeline) -> Iterator[Event]:
    for rank, row in enumerate(timeline.spans):
        for action, start, end in row:
            yield {
                **_at(rank, _ticks(start)),
                "ph": "X",
                "dur": (_ticks(end) - _ticks(start)) / 1000,
                "name": _name(action),
                "cat": NAMES[action.kind],
                "args": dict(_args(action)),
            }


def _args(action: Action) -> Iterator[tuple[str, int]]:
    yield "stage", action.stage
    yield "microbatch", action.microbatch
    if action.version != NO_VERSION:
        yield "makes weights" if action.kind is Kind.STEP else "with weights", action.version


def _memory(timeline: Timeline) -> Iterator[Event]:
    for rank, levels in enumerate(timeline.memory):
        for time, held in memory_steps(levels).items():
            counter = {"ph": "C", "name": f"rank {rank}", "args": {"memory": held}}
            yield {**_at(rank, _ticks(time)), **counter}


def _flows(timeline: Timeline) -> Iterator[Event]:
    """Yield an arrow for each message, from the action that made it to the one that reads it.

    Viewers attach an end to the action that encloses it, so ends are a nanosecond inside.
    """
    runs = _runs(timeline)
    times_seen: Counter[Action] = Counter()
    for number, (source, target, send, _, _) in enumerate(timeline.transfers):
        step = times_seen[send]
        times_seen[send] += 1
        writers = runs[source, send.stage, send.kind, send.microbatch]
        readers = runs[target, send.peer, send.kind, send.microbatch]
        if step < min(len(writers), len(readers)):
            flow = {"cat": "transfer", "name": str(send), "id": number}
            yield {**flow, "ph": "s", **_at(source, _last_tick(writers[step]))}
            yield {**flow, "ph": "f", "bp": "e", **_at(target, _first_tick(readers[step]))}


def _runs(timeline: Timeline) -> Mapping[tuple[int, int, Kind, int], list[Span]]:
    """Return the actions at the ends of each message, one for each traced step."""
    runs: dict[tuple[int, int, Kind, int], list[Span]] = defaultdict(list)
    for rank, row in enumerate(timeline.spans):
        for span in row:
            stage, kind, microbatch, _, _ = span.action
            if kind in MESSAGES:
                runs[rank, stage, MESSAGES[kind], microbatch].append(span)
    return runs


def _name(action: Action) -> str:
    whole = action.microbatch == WHOLE_BATCH
    return letter(action.kind) + ("" if whole else f" {action.microbatch}")


def _metadata(kind: str, rank: int, **args: object) -> Event:
    return {"ph": "M", "name": kind, "pid": PROCESS, "tid": rank + 1, "args": args}


def _at(rank: int, ticks: int) -> Event:
    return {"pid": PROCESS, "tid": rank + 1, "ts": ticks / 1000}


def _ticks(time: float) -> int:
    """Return a time in whole nanoseconds, so that actions end exactly where the next one starts."""
    return round(time * NANOSECONDS_PER_UNIT)


def _first_tick(span: Span) -> int:
    return min(_ticks(span.start) + 1, _ticks(span.end))


def _last_tick(span: Span) -> int:
    return max(_ticks(span.end) - 1, _ticks(span.start))
