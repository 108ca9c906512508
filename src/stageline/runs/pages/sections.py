"""The sections of a page about one run; one that has nothing to say is empty."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from stageline.costs import Costs
from stageline.report.overlay import Overlay
from stageline.report.summary import number
from stageline.report.svg.drawing import svg, xml
from stageline.report.timeline import Timeline
from stageline.runs.findings.finding import LEAST_GAIN, Finding
from stageline.runs.findings.measured_step import TIMES, MeasuredStep
from stageline.runs.pages import figures
from stageline.runs.pages.bars import MANY_ROWS, bar, bar_table, time_bars
from stageline.runs.pages.charts import Curve, chart
from stageline.runs.pages.elements import details, items, pairs, paragraph, section, table, tiles
from stageline.runs.pages.style import part_class, run_class
from stageline.runs.records import FAILED, SAVED, Event, Metrics
from stageline.runs.run import Run
from stageline.runs.timelines import titled
from stageline.units import format_bytes

LEGIBLE = 5.5  # font size in pixels of the numbers in a timeline
MOST_SHOWN_EVENTS = 20
BAR = part_class("optimizer")  # a bar without a meaning of its own is grey
PLANNED = part_class("bubble")


def heading(run: Run) -> str:
    css = "bad" if run.status == FAILED else "soft"
    return "\n".join(
        [
            f"<h1>{xml(run.name)}</h1>",
            paragraph(figures.status(run), css),
            tiles(figures.key_figures(run)),
        ]
    )


def faster(run: Run, found: Sequence[Finding]) -> str:
    """Return what would make the run faster."""
    title = "What would make it faster"
    if not found:
        words = f"Nothing was found that would gain {LEAST_GAIN:g} percent of a step."
        return section(title, paragraph(words)) if run.measured else ""
    shown = "\n".join(map(_finding, found))
    words = (
        "How much less time a step would take, simulated with the measured times. Each gain is for "
        "one change alone: they do not add up."
    )
    return section(title, paragraph(words, "soft"), f'<ul class="findings">{shown}</ul>')


def problems(run: Run) -> str:
    """Return errors and warnings, and what could not be read."""
    return section(
        "Errors and warnings",
        _losses_not_finite(run),
        items(map(_event, run.errors[-MOST_SHOWN_EVENTS:]), "events bad"),
        items(map(_event, run.warnings[-MOST_SHOWN_EVENTS:]), "events"),
        items((f"note: {note}" for note in run.notes), "events soft"),
    )


def curves(runs: Iterable[tuple[str, Run]]) -> str:
    """Return charts of named runs over each other."""
    named = list(runs)
    has_tokens = any(line.tokens_per_second is not None for _, run in named for line in run.metrics)
    shown = [chart("loss", _curves(named, lambda line: line.loss))]
    if has_tokens:
        shown.append(chart("tokens a second", _curves(named, lambda line: line.tokens_per_second)))
    else:
        speeds = _curves(named, lambda line: line.samples_per_second)
        shown.append(chart("samples a second", speeds))
    times = _curves(named, lambda line: line.step_seconds and 1e3 * line.step_seconds)
    shown.append(chart("time of a step", times, "ms"))
    idle = _curves(named, lambda line: None if line.bubble is None else 100 * line.bubble)
    shown.append(chart("idle", idle, "percent of all ranks"))
    content = "\n".join(filter(None, shown))
    return section("Curves", f'<div class="charts">{content}</div>' if content else "")


def where_time_goes(run: Run) -> str:
    rows = [(f"rank {time.rank}", time) for time in run.breakdown]
    words = (
        f"Recorded in step {run.measured_step}. Work of the optimizer, and waiting for data and "
        "checkpoints, are means of the last steps."
    )
    bars = time_bars(rows)
    return section("Where each rank's time goes", bars and paragraph(words, "soft"), bars)


def timeline(run: Run) -> str:
    """Return the recorded step as a picture, below what the plan expected."""
    if not run.measured:
        return ""
    measured = run.measured[-1]
    if run.predicted is None:
        picture = svg(measured, LEGIBLE)
    else:
        title = titled(run.configuration.schedule, "predicted and measured in ms")
        picture = Overlay(
            run.predicted, measured, title, _difference(run.predicted, measured)
        ).svg()
    words = f"Step {run.measured_step}, in milliseconds."
    css = "picture tall" if measured.num_ranks > MANY_ROWS else "picture"
    return section("Timeline", paragraph(words, "soft"), f'<div class="{css}">{picture}</div>')


def predictions(run: Run, step: MeasuredStep | None) -> str:
    """Return what the plan expected of each stage, and what was measured."""
    if run.predicted is None or run.predicted.costs is None or step is None:
        return ""
    rows = [
        (
            str(stage),
            *_compared(expected[0], found[0]),
            *_compared(sum(expected[1:]), sum(found[1:])),
        )
        for stage, (expected, found) in enumerate(
            zip(_stage_times(run.predicted.costs, len(step.stages)), step.stages, strict=True)
        )
    ]
    head = ("stage", "forward, planned", "measured", "", "backward, planned", "measured", "")
    shown = table(head, rows, "numbers")
    return section(
        "Predicted and measured",
        paragraph(_difference(run.predicted, run.measured[-1])),
        shown if len(rows) <= MANY_ROWS else details(f"{len(rows)} stages", shown),
        paragraph("Times of a micro-batch in ms; a backward includes recomputation.", "soft"),
    )


def _stage_times(costs: Costs, num_stages: int) -> list[tuple[float, ...]]:
    """Return the times of each stage, in the order of `TIMES`."""
    return list(zip(*(costs.per_stage(name, num_stages) for name in TIMES), strict=True))


def memory(run: Run) -> str:
    """Return the peak of each process, and what the plan expected of each rank."""
    peaks = run.metrics[-1].peak_memory if run.metrics else ()
    planned = run.configuration.plan.peak_memory if run.configuration.plan else ()
    most = max((*peaks, *planned), default=0.0)
    if not most:
        return ""
    rows = [(place, f"process {place}", peak, BAR) for place, peak in enumerate(peaks)]
    rows += [(place, f"rank {place}, planned", peak, PLANNED) for place, peak in enumerate(planned)]
    bars = [
        (name, bar(peak, most, css, format_bytes(peak)), format_bytes(peak))
        for _, name, peak, css in sorted(rows, key=lambda row: row[0])
    ]
    words = (
        "The peak of each process: of its accelerators, or of the whole process with Python and "
        "PyTorch if it has none."
    )
    return section("Memory", paragraph(words, "soft"), bar_table(bars))


def checkpoints(run: Run) -> str:
    saved = [event for event in run.events if event.kind == SAVED]
    kept = ", ".join(f"step {step}" for step in run.checkpoints[-MOST_SHOWN_EVENTS:])
    words = f"In the folder now: {kept}." if kept else "There is none in the folder now."
    if not saved and not kept:
        return ""
    last = (
        f" The last of {len(saved)} was saved at {figures.moment(saved[-1].time)}." if saved else ""
    )
    return section("Checkpoints", paragraph(words + last))


def settings(run: Run) -> str:
    """Return the configuration beside the environment."""
    left = f"<div><h3>Configuration</h3>{pairs(figures.configuration(run))}</div>"
    right = f"<div><h3>Environment</h3>{pairs(figures.environment(run))}</div>"
    return section("How it ran", f'<div class="columns">{left}{right}</div>', _stages(run))


def _stages(run: Run) -> str:
    """Return the layers of each stage, if there are names for all."""
    made = run.configuration
    if not made.layers or sum(made.balance) != len(made.layers):
        return ""
    rows, start = [], 0
    for stage, count in enumerate(made.balance):
        names = made.layers[start : start + count]
        shown = ", ".join(names) if count <= 8 else f"{', '.join(names[:4])}, …, {names[-1]}"
        rows.append((str(stage), shown))
        start += count
    return details("layers of each stage", table(("stage", "layers"), rows, "left"))


def _losses_not_finite(run: Run) -> str:
    steps = [line.step for line in run.metrics if line.loss is None]
    if not steps:
        return ""
    return paragraph(
        f"The loss was NaN or infinite in {len(steps)} reports, first at step {steps[0]}.", "bad"
    )


def _curves(
    runs: Iterable[tuple[str, Run]], value: Callable[[Metrics], float | None]
) -> Iterator[Curve]:
    for place, (name, run) in enumerate(runs):
        points = [(line.step, value(line)) for line in run.metrics]
        yield Curve(name, run_class(place), points)


def _finding(finding: Finding) -> str:
    gain = f"<b>−{finding.gain:.0f} %</b>" if finding.gain else '<span class="note">note</span>'
    return (
        f"<li>{gain}<div><strong>{xml(finding.title)}</strong>"
        f"<p>{xml(_sentence(finding.advice))}</p>"
        f'<p class="soft">{xml(_sentence(finding.measured))}</p></div></li>'
    )


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _event(event: Event) -> str:
    return f"{event.kind} at step {event.step}: {event.message}"


def _difference(predicted: Timeline, measured: Timeline) -> str:
    if not predicted.makespan:
        return f"measured {number(measured.makespan)} ms"
    error = 100 * (measured.makespan / predicted.makespan - 1)
    return (
        f"predicted {number(predicted.makespan)} ms, measured {number(measured.makespan)} ms "
        f"({error:+.1f} %)"
    )


def _compared(expected: float, found: float) -> tuple[str, str, str]:
    change = f"{100 * (found / expected - 1):+.0f} %" if expected else ""
    return number(expected), number(found), change
