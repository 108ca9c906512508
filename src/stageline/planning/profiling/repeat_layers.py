"""Make the profile of a deep model from that of a shallow one by repeating some of its layers.

stem   cell.0   cell.1   cell.2   head         counts (1, 1, 1, 3, 1)
stem   cell.0   cell.1   cell.2   cell.2 ×2   cell.2 ×3   head
        └────────┴────────┴────────┴──── every reader as far from its writer as before
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

from stageline.arguments import check_arguments, shown
from stageline.errors import PlanError
from stageline.limits import MOST_LAYERS, check_most
from stageline.planning.profiling.profile_result import (
    Measurement,
    Profile,
    TiedParameter,
    ValueCost,
)


def repeat_layers(profile: Profile, counts: Sequence[int]) -> Profile:
    """Return a profile in which layer i occurs `counts[i]` times in a row, with its own weights.

    Each copy reads from the layers just before it and costs the same. So a repeated layer has to be
    one after which nothing changes, such as the third of many cells that read the previous two. A
    model input is read by all copies of a layer that reads it.

    >>> from stageline.planning.profiling.profile_result import LayerCost
    >>> layer = LayerCost(1.0, 1.0, 1.0, 100, 100, 40, 0)
    >>> values = (ValueCost(-1, (0,), 8), ValueCost(0, (1,), 16))
    >>> shallow = Profile(("block", "head"), (Measurement(1, (layer, layer), values),))
    >>> deep = repeat_layers(shallow, (3, 1))
    >>> deep.names
    ('block', 'block ×2', 'block ×3', 'head')
    >>> [(value.writer, value.readers) for value in deep.measurements[0].values]
    [(-1, (0, 1, 2)), (0, (1,)), (1, (2,)), (2, (3,))]
    """
    check_arguments(repeat_layers, locals(), PlanError)
    if len(counts) != len(profile.names) or min(counts) < 1:
        raise PlanError(
            f"counts is {shown(tuple(counts))}, but needs a number from 1 up for each of "
            f"{len(profile.names)} layers"
        )
    check_most("the number of layers", sum(counts), MOST_LAYERS, error=PlanError)
    starts = list(accumulate(counts, initial=0))
    copies = [range(start, start + count) for start, count in zip(starts, counts, strict=False)]
    for weight in profile.tied:
        if repeated := [profile.names[layer] for layer in weight.layers if counts[layer] > 1]:
            raise PlanError(
                f"layer {repeated[0]!r} shares a weight with another layer, but each copy has its "
                "own weights: repeat only layers without tied weights"
            )
    return Profile(
        tuple(
            _name(n, copy)
            for n, times in zip(profile.names, counts, strict=True)
            for copy in range(times)
        ),
        tuple(_repeat_measurement(measurement, copies) for measurement in profile.measurements),
        tuple(
            TiedParameter(tuple(starts[i] for i in w.layers), w.parameters) for w in profile.tied
        ),
        profile.device,
        profile.host,
    )


def _name(name: str, copy: int) -> str:
    return f"{name} ×{copy + 1}" if copy else name


def _repeat_measurement(measurement: Measurement, copies: Sequence[range]) -> Measurement:
    """Repeat layers and values; `copies` has the new numbers of each layer."""
    pairs = zip(measurement.layers, copies, strict=True)
    return Measurement(
        measurement.samples,
        tuple(layer for layer, numbers in pairs for _ in numbers),
        tuple(copy for value in measurement.values for copy in _repeat_value(value, copies)),
        measurement.overheads,
    )


def _repeat_value(value: ValueCost, copies: Sequence[range]) -> Iterator[ValueCost]:
    if value.writer < 0:
        readers, let_go = (
            tuple(number for layer in layers for number in copies[layer])
            for layers in (value.readers, value.let_go)
        )
        yield replace(value, readers=readers, let_go=let_go)
        return
    for number in copies[value.writer]:
        shift = number - value.writer
        yield replace(
            value,
            writer=number,
            readers=tuple(reader + shift for reader in value.readers),
            let_go=tuple(layer + shift for layer in value.let_go),
        )
