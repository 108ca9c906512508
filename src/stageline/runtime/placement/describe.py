"""Describe a layout: the layers of each stage, what passes between stages, and why it is cut so."""

from __future__ import annotations

from collections.abc import Iterator

from stageline.model.layers import Value
from stageline.report.notebook import shortened, table_html, text_html
from stageline.runtime.placement.layout import Layout
from stageline.units import format_bytes

INDENT = "  "
COLUMNS = ("stage", "rank", "layers", "parameters", "cost", "sends to")


def describe(layout: Layout, model: str, notes: str) -> str:
    """Return the text that `print(pipe)` shows; `notes` how the stages were chosen."""
    lines = [_heading(layout, model), notes]
    for stage, numbers in enumerate(layout.stages):
        share = _share(layout, numbers)
        cost = f", {share} of the cost" if share else ""
        lines.append(f"stage {stage} on rank {layout.schedule.placement[stage]}{cost}")
        lines += [INDENT + line for line in _layer_lines(layout, numbers)]
        lines += [INDENT + line for line in _value_lines(layout, stage)]
    return "\n".join(lines)


def describe_html(layout: Layout, model: str, notes: str) -> str:
    """Return the table of stages that a notebook shows."""
    rows = (_cells(layout, stage) for stage in range(layout.schedule.num_stages))
    table = table_html(COLUMNS, rows, left=("layers", "sends to"), of="stages")
    return text_html(f"{_heading(layout, model)}\n{notes}") + table


def _cells(layout: Layout, stage: int) -> tuple[str, ...]:
    """Return a cell for each of `COLUMNS`."""
    numbers = layout.stages[stage]
    layers = [layout.layers.layers[number] for number in numbers]
    names = [layer.name for layer in (layers[0], layers[-1])]
    sizes = (p.numel() for layer in layers for p in layer.module.parameters())
    readers = sorted({reader for found in _readers(layout, stage).values() for reader in found})
    return (
        str(stage),
        str(layout.schedule.placement[stage]),
        names[0] if len(layers) == 1 else f"{names[0]} … {names[1]} ({len(layers)})",
        f"{sum(sizes):,}",
        _share(layout, numbers),
        shortened(", ".join(map(str, readers))),
    )


def _heading(layout: Layout, model: str) -> str:
    schedule = layout.schedule
    sizes = f"{len(layout.layers)} layers in {schedule.num_stages} stages"
    order = f"{schedule.name}, {schedule.num_microbatches} micro-batches"
    return f"{model}: {sizes} on {schedule.num_ranks} ranks, {order}"


def _share(layout: Layout, numbers: range) -> str:
    """Return the share of these layers in all costs; nothing if costs are not known."""
    total = sum(layout.costs)
    return f"{sum(layout.costs[n] for n in numbers) / total:.0%}" if total else ""


def _layer_lines(layout: Layout, numbers: range) -> Iterator[str]:
    layers = [layout.layers.layers[number] for number in numbers]
    width = max(len(layer.name) for layer in layout.layers)
    for layer in layers:
        size = sum(parameter.numel() for parameter in layer.module.parameters())
        yield f"{layer.name:<{width}}  {size:>13,} parameters"


def _value_lines(layout: Layout, stage: int) -> Iterator[str]:
    """Yield the values that a stage writes for others, with their readers."""
    recording = layout.layers.recording
    sizes = recording.value_sizes() if recording is not None else {}
    for value, readers in _readers(layout, stage).items():
        to = f"to stage{'s' if len(readers) > 1 else ''} {', '.join(map(str, readers))}"
        found = sizes.get(value.name)
        size = f", {found.shape}, {format_bytes(found.num_bytes)}" if found is not None else ""
        yield f"└─ {value.name}{size}, {to}"


def _readers(layout: Layout, stage: int) -> dict[Value, list[int]]:
    """Return the values that a stage writes, with the later stages that read them."""
    found: dict[Value, list[int]] = {}
    for other, numbers in enumerate(layout.stages):
        for number in numbers:
            for value in layout.layers.sources[number]:
                if other != stage and value.writer in layout.stages[stage]:
                    readers = found.setdefault(value, [])
                    readers += [other] if other not in readers else []
    return dict(sorted(found.items()))
