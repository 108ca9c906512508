"""The profile of a deep model from that of a shallow one, some of whose layers come many times.

stem   cell.0   cell.1   cell.2   head         counts (1, 1, 1, 3, 1)
stem   cell.0   cell.1   cell.2   cell.2 ×2   cell.2 ×3   head
        └────────┴────────┴────────┴──── every reader as far behind its writer as before
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

from stageline.arguments import check_arguments, shown
from stageline.errors import PlanError
from stageline.limits import MOST_LAYERS, check_most
from stageline.planning.profiling.profile import Measurement, Profile, Tied, ValueCost


def repeated(profile: Profile, counts: Sequence[int]) -> Profile:
    """Layer i `counts[i]` times in a row, each time with weights of its own.

    For layers that read what those just before them wrote, and that cost the same each time: so a
    layer to repeat has to be one behind which nothing changes, such as the third of many cells that
    read from two. What the loader brings is read by all copies of a layer that reads it.

    >>> from stageline.planning.profiling.profile import LayerCost
    >>> layer = LayerCost(1.0, 1.0, 1.0, 100, 100, 40, 0)
    >>> values = (ValueCost(-1, (0,), 8), ValueCost(0, (1,), 16))
    >>> shallow = Profile(("block", "head"), (Measurement(1, (layer, layer), values),))
    >>> deep = repeated(shallow, (3, 1))
    >>> deep.names
    ('block', 'block ×2', 'block ×3', 'head')
    >>> [(value.writer, value.readers) for value in deep.measurements[0].values]
    [(-1, (0, 1, 2)), (0, (1,)), (1, (2,)), (2, (3,))]
    """
    check_arguments(repeated, locals(), PlanError)
    if len(counts) != len(profile.names) or min(counts) < 1:
        raise PlanError(
            f"counts is {shown(tuple(counts))}, but needs a number of 1 or more for each of "
            f"{len(profile.names)} layers"
        )
    check_most("the number of layers", sum(counts), MOST_LAYERS, error=PlanError)
    starts = list(accumulate(counts, initial=0))
    places = [range(start, start + count) for start, count in zip(starts, counts, strict=False)]
    for weight in profile.tied:
        if many := [profile.names[layer] for layer in weight.layers if counts[layer] > 1]:
            raise PlanError(
                f"layer {many[0]!r} shares a weight with another, so its copies would too, but "
                "they have weights of their own: repeat others"
            )
    return Profile(
        tuple(
            _name(n, copy)
            for n, times in zip(profile.names, counts, strict=True)
            for copy in range(times)
        ),
        tuple(_repeated(measurement, places) for measurement in profile.measurements),
        tuple(Tied(tuple(starts[i] for i in w.layers), w.parameters) for w in profile.tied),
        profile.device,
    )


def _name(name: str, copy: int) -> str:
    return f"{name} ×{copy + 1}" if copy else name


def _repeated(measurement: Measurement, places: Sequence[range]) -> Measurement:
    pairs = zip(measurement.layers, places, strict=True)
    return Measurement(
        measurement.samples,
        tuple(layer for layer, row in pairs for _ in row),
        tuple(copy for value in measurement.values for copy in _copies(value, places)),
    )


def _copies(value: ValueCost, places: Sequence[range]) -> Iterator[ValueCost]:
    if value.writer < 0:
        readers, let_go = (
            tuple(place for layer in layers for place in places[layer])
            for layers in (value.readers, value.let_go)
        )
        yield replace(value, readers=readers, let_go=let_go)
        return
    for place in places[value.writer]:
        further = place - value.writer
        yield replace(
            value,
            writer=place,
            readers=tuple(reader + further for reader in value.readers),
            let_go=tuple(layer + further for layer in value.let_go),
        )
