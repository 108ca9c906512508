"""Profile: the time and memory of each layer of a model, for several micro-batch sizes."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import fields, replace
from functools import cached_property
from itertools import accumulate
from typing import Annotated

from pydantic import Field

from stageline.arguments import RenamedAttribute, check_size, shown
from stageline.errors import PlanError
from stageline.limits import MOST_COUNT, MOST_LAYERS, MOST_SAMPLES, check_most
from stageline.planning.console import format_table
from stageline.planning.profiling.trial.stage_overheads import (
    NO_HOST_COSTS,
    NO_OVERHEADS,
    ActionOverheads,
    HostCosts,
)
from stageline.planning.validation import (
    Amount,
    Count,
    Difference,
    WholeNumber,
    read_json,
    validated,
    write_json,
)
from stageline.report.notebook import table_html, text_html
from stageline.units import format_bytes

COLUMNS = ("layer", "forward, ms", "backward, ms", "", "activation", "parameters")
LARGE_SPREAD = 0.2  # of the layers' time


@validated
class LayerCost:
    """The time and memory of one layer for one micro-batch, in seconds and bytes.

    `activation` and `retained` count what the layer itself wrote. So a stage keeps the sum over its
    layers, plus what it reads from other stages, plus the unsaved part of what it sends.
    """

    forward: Amount
    input_grad: Amount  # B takes input_grad + weight_grad
    weight_grad: Amount
    activation: Amount  # kept from F until I, without the layer's inputs from other stages
    retained: Amount  # the part of it that is kept until W
    parameters: Amount
    buffers: Amount
    waiting: Amount = 0.0  # gradients that are kept from I until W, in addition to retained
    halving: Amount = 0.0  # seconds that F, I and W take longer than F and B
    spread: Amount = 0.0  # half of the interquartile range of F + B over the rounds, in seconds
    momentary: Amount = 0.0  # temporary bytes, only while its forward or backward runs
    halving_input: Difference = 0.0  # the part of `halving` in I
    halving_weight: Difference = 0.0  # the part of it in W; the rest is in F
    results: Amount = 0.0  # bytes that selective recomputation keeps, see `kept_results.py`
    time_saved: Amount = 0.0  # seconds of a recomputation that they save

    @property
    def backward(self) -> float:
        """The time of B."""
        return self.input_grad + self.weight_grad

    @property
    def time(self) -> float:
        """The time of F and B together."""
        return self.forward + self.backward


@validated
class ValueCost:
    """A value that one layer writes and later layers read, with its bytes in one micro-batch.

    A stage that reads it receives it directly from the writer's stage, once for all its layers.
    `writer` is -1 for a model input, which every rank gets from its own data loader.
    """

    writer: Annotated[WholeNumber, Field(ge=-1, le=MOST_COUNT)]
    readers: tuple[WholeNumber, ...]
    size: Amount
    unsaved: Amount = 0.0  # the part that no layer saves: kept from F until I only if it is sent
    let_go: tuple[WholeNumber, ...] = ()  # its writer or readers that do not keep it until W


@validated
class Measurement:
    """The costs of all layers and values for one micro-batch size."""

    samples: Count
    layers: tuple[LayerCost, ...]
    values: tuple[ValueCost, ...]
    overheads: ActionOverheads = NO_OVERHEADS  # which each layer's times include

    over = RenamedAttribute("sum_over")
    momentary = RenamedAttribute("temporary_bytes")

    def sum_over(self, layers: range, name: str) -> float:
        """Return the sum of one field of `LayerCost` over consecutive layers."""
        sums = self._prefix_sums[name]
        return sums[layers.stop] - sums[layers.start]

    def temporary_bytes(self, layers: range) -> float:
        """Return the temporary bytes of a stage in addition to all that it keeps.

        In the backward, a layer runs after later layers have freed their activations.
        """
        peak = freed = 0.0
        for number in reversed(layers):
            peak = max(peak, self.layers[number].momentary - freed)
            freed += self.layers[number].activation
        return peak

    @property
    def times_in_stage(self) -> list[float]:
        """The time of F and B of each layer beside others in a stage."""
        overhead = self.overheads.forward + self.overheads.backward
        return [max(0.0, layer.time - overhead) for layer in self.layers]

    @cached_property
    def _prefix_sums(self) -> dict[str, list[float]]:
        """Sums over the first layers, by field: a search needs the sums of thousands of stages."""
        return {
            cost.name: list(accumulate((getattr(la, cost.name) for la in self.layers), initial=0.0))
            for cost in fields(LayerCost)
        }

    @property
    def spread(self) -> float:
        """The relative spread of times, weighted by time: short layers vary most."""
        total = sum(layer.time for layer in self.layers)
        return sum(layer.spread for layer in self.layers) / total if total else 0.0


@validated
class TiedParameter:
    """A parameter that several layers share; each rank with any of them holds it once."""

    layers: tuple[WholeNumber, ...]
    parameters: Amount  # its bytes, which each of these layers counts in its own `parameters`


@validated
class Profile:
    """The result of `sl.profile` or `sl.estimate`; `at(samples)` gives the costs for any size.

    >>> layer = LayerCost(1.0, 1.0, 1.0, 100, 100, 40, 0)
    >>> twice = LayerCost(1.5, 1.5, 1.5, 200, 200, 40, 0)
    >>> profile = Profile(("a",), (Measurement(1, (layer,), ()), Measurement(2, (twice,), ())))
    >>> profile.at(4).layers[0].forward, profile.at(4).layers[0].activation
    (2.5, 400.0)
    """

    names: tuple[str, ...]  # of the layers
    measurements: tuple[Measurement, ...]  # by ascending number of samples
    tied: tuple[TiedParameter, ...] = ()
    device: str = ""  # a description of the device that it was measured on
    host: HostCosts = NO_HOST_COSTS

    def __post_init__(self) -> None:
        sizes = [measurement.samples for measurement in self.measurements]
        if not sizes or sizes != sorted(set(sizes)):
            raise PlanError(
                f"measurements are of {sizes} samples, but need at least one size, in ascending "
                "order"
            )
        for measurement in self.measurements:
            self._check(measurement)
            self._check_same_values(measurement)
        for weight in self.tied:
            if not all(0 <= layer < len(self.names) for layer in weight.layers):
                raise PlanError(
                    f"a tied weight has layers {shown(weight.layers)}, but layers are numbered "
                    f"from 0 to {len(self.names) - 1}"
                )

    def _check_same_values(self, measurement: Measurement) -> None:
        """Raise `PlanError` unless a size has the same values between layers as the first one."""
        first = self.measurements[0]
        values, others = (
            [(value.writer, value.readers, value.let_go) for value in each.values]
            for each in (first, measurement)
        )
        if values != others:
            raise PlanError(
                f"the values of {measurement.samples} samples differ from those of "
                f"{first.samples}, but need the same writers and readers: profile again"
            )

    def _check(self, measurement: Measurement) -> None:
        count = len(self.names)
        if not count:
            raise PlanError("the profile has no layers, but needs at least one")
        check_most("the number of layers", count, MOST_LAYERS, error=PlanError)
        if len(measurement.layers) != count:
            raise PlanError(
                f"the profile names {count} layers, but has costs of {len(measurement.layers)} "
                f"for {measurement.samples} samples: give costs for each layer"
            )
        for value in measurement.values:
            if not all(value.writer < reader < count for reader in value.readers):
                raise PlanError(
                    f"a value of layer {value.writer} is read by layers {shown(value.readers)}, "
                    f"but readers have to come later, and before layer {count}"
                )
            if not {value.writer, *value.readers} >= set(value.let_go):
                raise PlanError(
                    f"let_go of a value of layer {value.writer} is {shown(value.let_go)}, but may "
                    "have only its writer and readers"
                )

    def at(self, samples: int) -> Measurement:
        """Return costs for a micro-batch size, interpolated or extrapolated from measured sizes."""
        check_size("samples", samples, error=PlanError)
        check_most("samples", samples, MOST_SAMPLES, error=PlanError)
        sizes = [measurement.samples for measurement in self.measurements]
        if len(sizes) == 1:
            only = self.measurements[0]
            return _interpolate(samples, only, only, samples / only.samples, proportional=True)
        right = min(max(bisect_left(sizes, samples), 1), len(sizes) - 1)
        low, high = self.measurements[right - 1 : right + 1]
        share = (samples - low.samples) / (high.samples - low.samples)
        return _interpolate(samples, low, high, share)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile to a JSON file."""
        write_json(path, self)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Profile:
        """Read a profile from a JSON file that `save` has written."""
        return read_json(path, Profile)

    def __str__(self) -> str:
        """Return a table for the largest micro-batch, with a note if times vary a lot."""
        rows = map(_row, self.names, self.measurements[-1].layers)
        lines = [self._heading(), format_table(COLUMNS, rows, left=COLUMNS[:1]), self._note()]
        return "\n".join(filter(None, lines))

    def _repr_html_(self) -> str:
        """Return the table, for notebooks."""
        rows = map(_row, self.names, self.measurements[-1].layers)
        table = table_html(COLUMNS, rows, left=COLUMNS[:1], of="layers")
        return text_html(self._heading()) + table + text_html(self._note())

    def _heading(self) -> str:
        device = f", on {self.device}" if self.device else ""
        return f"a micro-batch of {self.measurements[-1].samples} samples{device}"

    def _note(self) -> str:
        """Return a remark if times vary a lot, or nothing."""
        spread = max(measurement.spread for measurement in self.measurements)
        remark = f"times vary by ± {100 * spread:.0f} %: is something else running?"
        return remark if spread > LARGE_SPREAD else ""


def _row(name: str, layer: LayerCost) -> tuple[str, ...]:
    """Return a cell for each of `COLUMNS`."""
    total = layer.time
    return (
        name,
        f"{1e3 * layer.forward:.4g}",
        f"{1e3 * layer.backward:.4g}",
        f"± {100 * layer.spread / total:.0f} %" if layer.spread and total else "",
        format_bytes(layer.activation),
        format_bytes(layer.parameters),
    )


def _interpolate(
    samples: int,
    low: Measurement,
    high: Measurement,
    share: float,
    *,
    proportional: bool = False,
) -> Measurement:
    """Return costs on the line through two measurements, at a share of the way between them.

    `proportional` if there is only one: then all but parameters and buffers grow with the samples.
    """

    def difference(a: float, b: float) -> float:
        """Interpolate what may be negative; beyond the measured sizes it stays as it is."""
        return a * share if proportional else a + (b - a) * min(max(share, 0.0), 1.0)

    def between(a: float, b: float) -> float:
        if proportional:
            return a * share
        if share > 1:  # noise must not make more samples cost less
            return b + max(0.0, b - a) * (share - 1)
        return max(0.0, a + (b - a) * share)

    return Measurement(
        samples,
        tuple(
            _interpolate_layer(a, b, between, difference)
            for a, b in zip(low.layers, high.layers, strict=True)
        ),
        tuple(
            replace(a, size=between(a.size, b.size), unsaved=between(a.unsaved, b.unsaved))
            for a, b in zip(low.values, high.values, strict=True)
        ),
        low.overheads if share < 0.5 else high.overheads,
    )


def _interpolate_layer(
    a: LayerCost,
    b: LayerCost,
    between: Callable[[float, float], float],
    difference: Callable[[float, float], float],
) -> LayerCost:
    rules = {
        "parameters": lambda fixed, _: fixed,
        "buffers": lambda fixed, _: fixed,
        "halving_input": difference,
        "halving_weight": difference,
    }
    costs = {
        cost.name: rules.get(cost.name, between)(getattr(a, cost.name), getattr(b, cost.name))
        for cost in fields(LayerCost)
    }
    return LayerCost(**costs | {"retained": min(costs["retained"], costs["activation"])})
