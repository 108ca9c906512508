"""Describe a layout: the layers of each stage, what passes between stages, and why it is cut so."""

from __future__ import annotations

from collections.abc import Iterator

from stageline.model.layers import Value
from stageline.runtime.placement.layout import Layout
from stageline.units import format_bytes

INDENT = "  "


def describe(layout: Layout, model: str, reason: str) -> str:
    """Return the text that `print(pipe)` shows; `reason` says how the stages were chosen."""
    schedule, layers = layout.schedule, layout.layers
    total = sum(layout.costs)
    sizes = f"{len(layers)} layers in {schedule.num_stages} stages on {schedule.num_ranks} ranks"
    lines = [
        f"{model}: {sizes}, {schedule.name}, {schedule.num_microbatches} micro-batches",
        reason,
    ]
    for stage, numbers in enumerate(layout.stages):
        share = sum(layout.costs[n] for n in numbers) / total if total else 0.0
        cost = f", {share:.0%} of the cost" if total else ""
        lines.append(f"stage {stage} on rank {schedule.placement[stage]}{cost}")
        lines += [INDENT + line for line in _layer_lines(layout, numbers)]
        lines += [INDENT + line for line in _value_lines(layout, stage)]
    return "\n".join(lines)


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
