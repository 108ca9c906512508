"""A profile: what each layer of a model costs, for micro-batches of several sizes."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import fields, replace
from functools import cached_property
from itertools import accumulate
from typing import Annotated

from pydantic import Field

from stageline.arguments import check_size, shown
from stageline.errors import PlanError
from stageline.limits import MOST_COUNT, MOST_LAYERS, MOST_SAMPLES, check_most
from stageline.planning.checked import Amount, Count, Whole, checked, read_json, write_json
from stageline.planning.tables import table
from stageline.units import format_bytes

COLUMNS = ("layer", "forward, ms", "backward, ms", "", "activation", "parameters")
MUCH = 0.2  # of what layers take


@checked
class LayerCost:
    """Of one layer, for one micro-batch; seconds and bytes.

    `activation` and `retained` are of what the layer itself wrote, so a stage keeps the sum of its
    layers', and beside that what it reads from other stages and what is unsaved of what it sends.
    """

    forward: Amount
    input_grad: Amount  # with weight_grad what B takes
    weight_grad: Amount
    activation: Amount  # kept from F until I, without the layer's own inputs from other stages
    retained: Amount  # the part of it that is kept until W
    parameters: Amount
    buffers: Amount
    waiting: Amount = 0.0  # gradients that are kept from I until W, beside what is retained
    halving: Amount = 0.0  # seconds by which F, I and W take longer than F and B, most of it in F
    spread: Amount = 0.0  # seconds by which F and B together vary: half of what quartiles are apart
    momentary: Amount = 0.0  # bytes beside all that, while its forward or backward runs

    @property
    def backward(self) -> float:
        return self.input_grad + self.weight_grad

    @property
    def time(self) -> float:
        return self.forward + self.backward


@checked
class ValueCost:
    """A value that one layer writes and later ones read; bytes, for one micro-batch.

    A reader on another stage gets it straight from the writer, once for all layers there. `writer`
    is -1 for what the loader brings, which every rank has.
    """

    writer: Annotated[Whole, Field(ge=-1, le=MOST_COUNT)]
    readers: tuple[Whole, ...]
    size: Amount
    unsaved: Amount = 0.0  # kept from F until I only if it is sent, and in no layer's activation
    let_go: tuple[Whole, ...] = ()  # of its writer and readers those that do not keep it until W


@checked
class Measurement:
    """All layers and values, for a micro-batch of so many samples."""

    samples: Count
    layers: tuple[LayerCost, ...]
    values: tuple[ValueCost, ...]

    def over(self, layers: range, name: str) -> float:
        """The sum of one of the layers' costs."""
        sums = self._sums[name]
        return sums[layers.stop] - sums[layers.start]

    def momentary(self, layers: range) -> float:
        """Of a stage, beside all that it keeps: a layer runs when what later ones kept is gone."""
        most = freed = 0.0
        for number in reversed(layers):
            most = max(most, self.layers[number].momentary - freed)
            freed += self.layers[number].activation
        return most

    @cached_property
    def _sums(self) -> dict[str, list[float]]:
        """Over the first layers, for a search asks for thousands of stages."""
        return {
            cost.name: list(accumulate((getattr(la, cost.name) for la in self.layers), initial=0.0))
            for cost in fields(LayerCost)
        }

    @property
    def spread(self) -> float:
        """By which share times vary; short layers, which vary most, count as much as they take."""
        taken = sum(layer.time for layer in self.layers)
        return sum(layer.spread for layer in self.layers) / taken if taken else 0.0


@checked
class Tied:
    """A parameter that several layers use: each rank that has one of them holds it once."""

    layers: tuple[Whole, ...]
    parameters: Amount  # bytes; part of each of these layers' own


@checked
class Profile:
    """What `sl.profile` found; `at(samples)` gives costs for any size of micro-batch.

    >>> layer = LayerCost(1.0, 1.0, 1.0, 100, 100, 40, 0)
    >>> twice = LayerCost(1.5, 1.5, 1.5, 200, 200, 40, 0)
    >>> profile = Profile(("a",), (Measurement(1, (layer,), ()), Measurement(2, (twice,), ())))
    >>> profile.at(4).layers[0].forward, profile.at(4).layers[0].activation
    (2.5, 400.0)
    """

    names: tuple[str, ...]  # of the layers
    measurements: tuple[Measurement, ...]  # by ascending number of samples
    tied: tuple[Tied, ...] = ()
    device: str = ""  # what it was measured on

    def __post_init__(self) -> None:
        sizes = [measurement.samples for measurement in self.measurements]
        if not sizes or sizes != sorted(set(sizes)):
            raise PlanError(f"measurements are of {sizes} samples, but have to ascend")
        for measurement in self.measurements:
            self._check(measurement)
            self._check_alike(measurement)
        for weight in self.tied:
            if not all(0 <= layer < len(self.names) for layer in weight.layers):
                raise PlanError(
                    f"a tied weight is of layers {shown(weight.layers)}, but layers go from 0 to "
                    f"{len(self.names) - 1}"
                )

    def _check_alike(self, measurement: Measurement) -> None:
        """All sizes of micro-batches have the same values between layers."""
        first = self.measurements[0]
        values, others = (
            [(value.writer, value.readers, value.let_go) for value in each.values]
            for each in (first, measurement)
        )
        if values != others:
            raise PlanError(
                f"the values of {measurement.samples} samples are not those of {first.samples}, "
                "but they have the same writers and readers for every size: profile anew"
            )

    def _check(self, measurement: Measurement) -> None:
        count = len(self.names)
        if not count:
            raise PlanError("the profile has no layers, but needs one at least")
        check_most("the number of layers", count, MOST_LAYERS, error=PlanError)
        if len(measurement.layers) != count:
            raise PlanError(
                f"{count} layers have names, but {len(measurement.layers)} have costs for "
                f"{measurement.samples} samples: give each of them costs"
            )
        for value in measurement.values:
            if not all(value.writer < reader < count for reader in value.readers):
                raise PlanError(
                    f"a value of layer {value.writer} is read by layers {shown(value.readers)}, "
                    f"but readers come later, and before layer {count}"
                )
            if not {value.writer, *value.readers} >= set(value.let_go):
                raise PlanError(
                    f"a value of layer {value.writer} is let go by layers {shown(value.let_go)}, "
                    "but these are of its writer and readers"
                )

    def at(self, samples: int) -> Measurement:
        """Between measured sizes on a straight line; beyond them on that of the last two."""
        check_size("samples", samples, error=PlanError)
        check_most("samples", samples, MOST_SAMPLES, error=PlanError)
        sizes = [measurement.samples for measurement in self.measurements]
        if len(sizes) == 1:
            only = self.measurements[0]
            return _mixed(samples, only, only, samples / only.samples, grows=True)
        right = min(max(bisect_left(sizes, samples), 1), len(sizes) - 1)
        low, high = self.measurements[right - 1 : right + 1]
        share = (samples - low.samples) / (high.samples - low.samples)
        return _mixed(samples, low, high, share)

    def save(self, path: str | os.PathLike[str]) -> None:
        """As JSON."""
        write_json(path, self)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Profile:
        return read_json(path, Profile)

    def __str__(self) -> str:
        """What layers cost in the largest micro-batch, and a hint if times vary much."""
        largest = self.measurements[-1]
        words = f"a micro-batch of {largest.samples} samples"
        head = f"{words}, on {self.device}" if self.device else words
        rows = map(_row, self.names, largest.layers)
        lines = [head, table(COLUMNS, rows, left=COLUMNS[:1])]
        spread = max(measurement.spread for measurement in self.measurements)
        if spread > MUCH:
            lines.append(f"times vary by ± {100 * spread:.0f} %: is something else running?")
        return "\n".join(lines)


def _row(name: str, layer: LayerCost) -> tuple[str, ...]:
    """A cell for each of `COLUMNS`."""
    taken = layer.time
    return (
        name,
        f"{1e3 * layer.forward:.4g}",
        f"{1e3 * layer.backward:.4g}",
        f"± {100 * layer.spread / taken:.0f} %" if layer.spread and taken else "",
        format_bytes(layer.activation),
        format_bytes(layer.parameters),
    )


def _mixed(
    samples: int, low: Measurement, high: Measurement, share: float, *, grows: bool = False
) -> Measurement:
    """`grows`: there is one measurement, and all but parameters and buffers grows with samples."""

    def between(a: float, b: float) -> float:
        if grows:
            return a * share
        if share > 1:  # noise must not make more samples cost less
            return b + max(0.0, b - a) * (share - 1)
        return max(0.0, a + (b - a) * share)

    return Measurement(
        samples,
        tuple(_mixed_layer(a, b, between) for a, b in zip(low.layers, high.layers, strict=True)),
        tuple(
            replace(a, size=between(a.size, b.size), unsaved=between(a.unsaved, b.unsaved))
            for a, b in zip(low.values, high.values, strict=True)
        ),
    )


def _mixed_layer(a: LayerCost, b: LayerCost, between: Callable[[float, float], float]) -> LayerCost:
    pairs = {
        cost.name: (getattr(a, cost.name), getattr(b, cost.name)) for cost in fields(LayerCost)
    }
    mixed = {
        name: pair[0] if name in ("parameters", "buffers") else between(*pair)
        for name, pair in pairs.items()
    }
    return LayerCost(**mixed | {"retained": min(mixed["retained"], mixed["activation"])})
