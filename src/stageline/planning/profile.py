"""A profile: what each layer of a model costs, for micro-batches of several sizes."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import fields, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from stageline.errors import PlanError

Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
CHECKED = ConfigDict(extra="forbid")
T = TypeVar("T")


@dataclass(frozen=True, config=CHECKED)
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


@dataclass(frozen=True, config=CHECKED)
class ValueCost:
    """A value that one layer writes and later ones read; bytes, for one micro-batch.

    A reader on another stage gets it straight from the writer, once for all layers there. `writer`
    is -1 for what the loader brings, which every rank has.
    """

    writer: Annotated[int, Field(ge=-1)]
    readers: tuple[int, ...]
    size: Amount
    unsaved: Amount = 0.0  # kept from F until I only if it is sent, and in no layer's activation
    let_go: tuple[int, ...] = ()  # of its writer and readers those that do not keep it until W


@dataclass(frozen=True, config=CHECKED)
class Measurement:
    """All layers and values, for a micro-batch of so many samples."""

    samples: Count
    layers: tuple[LayerCost, ...]
    values: tuple[ValueCost, ...]

    def over(self, layers: range, name: str) -> float:
        """The sum of one of the layers' costs."""
        sums = self._sums[name]
        return sums[layers.stop] - sums[layers.start]

    @cached_property
    def _sums(self) -> dict[str, list[float]]:
        """Over the first layers, for a search asks for thousands of stages."""
        return {
            cost.name: list(accumulate((getattr(la, cost.name) for la in self.layers), initial=0.0))
            for cost in fields(LayerCost)
        }


@dataclass(frozen=True, config=CHECKED)
class Tied:
    """A parameter that several layers use: each rank that has one of them holds it once."""

    layers: tuple[int, ...]
    parameters: Amount  # bytes; part of each of these layers' own


@dataclass(frozen=True, config=CHECKED)
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

    def _check(self, measurement: Measurement) -> None:
        count = len(self.names)
        if len(measurement.layers) != count:
            raise PlanError(
                f"{count} layers have names, but {len(measurement.layers)} have costs for "
                f"{measurement.samples} samples: give each of them costs"
            )
        for value in measurement.values:
            if not all(value.writer < reader < count for reader in value.readers):
                raise PlanError(
                    f"a value of layer {value.writer} is read by layers {value.readers}, but "
                    f"readers come later, and before layer {count}"
                )

    def at(self, samples: int) -> Measurement:
        """Between measured sizes on a straight line; beyond them on that of the last two."""
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
        Path(path).write_bytes(TypeAdapter(Profile).dump_json(self, indent=1))

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Profile:
        return read_json(path, TypeAdapter(Profile))


def read_json(path: str | os.PathLike[str], kind: TypeAdapter[T]) -> T:
    """A file from outside; raises `PlanError` with the first thing that is wrong with it."""
    try:
        return kind.validate_json(Path(path).read_bytes())
    except OSError as error:
        raise PlanError(f"{os.fspath(path)!r} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        raise PlanError(f"{os.fspath(path)!r} {first_fault(error)}") from None


def first_fault(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in first["loc"]) or "it"
    found = "" if first["type"] == "missing" else f" (it is {first['input']!r})"
    return f"has a fault at {place}: {first['msg'].lower()}{found}"


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
