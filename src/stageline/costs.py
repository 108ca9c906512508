"""Define `Costs`: the time and memory of each stage, as one number for all or one per stage."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from stageline.arguments import check_size, shown
from stageline.errors import CostsError
from stageline.files import read_json
from stageline.limits import LEAST_AMOUNT, MOST_AMOUNT, MOST_STAGES, check_most

PerStage = float | Sequence[float]


@dataclass(frozen=True)
class Link:
    """A one-way connection between two ranks, with a fixed latency and a bandwidth.

    Messages on a link queue: the bytes of the second are sent after those of the first.
    """

    latency: float = 0.0
    bandwidth: float = math.inf

    def __post_init__(self) -> None:
        object.__setattr__(self, "latency", _number("latency", self.latency))
        if not isinstance(self.bandwidth, float) or self.bandwidth != math.inf:
            object.__setattr__(self, "bandwidth", _number("bandwidth", self.bandwidth))
        if not self.bandwidth:
            raise CostsError("bandwidth is 0, but must be positive: use math.inf for no limit")


@dataclass(frozen=True)
class Costs:
    """The times and bytes of the stages of a pipeline, for one micro-batch.

    Each is a number, or one number per stage, in any unit. A stage's output, and later its
    gradient, takes `transfer[stage]` plus the time of the link to reach the other stage.

    >>> costs = Costs(forward=[1.0, 1.5], input_grad=2.0)
    >>> costs.per_stage("forward", 2), costs.per_stage("input_grad", 2)
    ((1.0, 1.5), (2.0, 2.0))
    """

    forward: PerStage = 1.0
    input_grad: PerStage = 1.0
    weight_grad: PerStage = 1.0
    transfer: PerStage = 0.0

    activation: PerStage = 1.0  # held from the start of F to the end of I (or B)
    # the part of the activation held until the end of W; by default all of it
    retained: PerStage | None = None

    waiting: PerStage = 0.0  # gradients held from the end of I to the end of W, in addition

    # time of the second forward, added to I or B; it need not wait for the gradient
    recompute: PerStage = 0.0
    working_set: PerStage = 0.0  # held only while I or B runs: the recomputed activations

    parameters: PerStage = 0.0  # bytes of one version of the weights
    gradients: PerStage = 0.0
    optimizer_state: PerStage = 0.0

    message: PerStage = 0.0  # bytes of a stage's output
    # one for all pairs of ranks, or by (from, to); other pairs are then free
    links: Link | Mapping[tuple[int, int], Link] = field(default_factory=Link)
    reduce: PerStage = 0.0  # time of a stage's gradient reduction over replicas
    step: PerStage = 0.0  # time of a stage's optimizer step

    def __post_init__(self) -> None:
        if self.retained is None:
            object.__setattr__(self, "retained", self.activation)
        for name in PER_STAGE:
            object.__setattr__(self, name, _numbers(name, getattr(self, name)))
        self._check_lengths()
        self._check_retained()
        self._check_links()

    @staticmethod
    def of_a_rank(chunks_per_rank: int = 1, **shares: Any) -> Costs:
        """Return costs per stage from costs per rank, for a rank that holds several stages.

        A number is divided evenly over the rank's chunks, so that schedules with one chunk and
        with several describe the same model. A list has a value for each stage and is not divided,
        nor are `transfer`, `message` and `links`, which are between stages. Defaults of 1 are for
        a rank here. The command line interprets its costs in this way.

        >>> costs = Costs.of_a_rank(2, forward=1.1, transfer=0.05)
        >>> costs.forward, costs.input_grad, costs.transfer
        (0.55, 0.5, 0.05)
        """
        check_size("chunks_per_rank", chunks_per_rank)
        check_most("chunks_per_rank", chunks_per_rank, MOST_STAGES)
        if unknown := sorted(shares.keys() - {*PER_STAGE, "links"}):
            raise CostsError(
                f"{shown(unknown[0])} was given, but costs are {', '.join(PER_STAGE)} and links"
            )
        values = dict.fromkeys(UNIT, 1.0) | shares
        values.setdefault("retained", values["activation"])
        for name, value in values.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if name not in BETWEEN_STAGES and is_number:
                values[name] = _number(name, value) / chunks_per_rank
        return Costs(**values)

    def per_stage(self, name: str, num_stages: int) -> tuple[float, ...]:
        """Return the values of one field, one for every stage."""
        if name not in PER_STAGE:
            raise CostsError(f"{shown(name)} is not known, but costs are {', '.join(PER_STAGE)}")
        value: float | tuple[float, ...] = getattr(self, name)
        if not isinstance(value, tuple):
            return (value,) * num_stages
        if len(value) != num_stages:
            raise CostsError(
                f"{name} has {len(value)} values, but the schedule has {num_stages} stages: "
                f"give one number, or {num_stages} numbers"
            )
        return value

    def per_rank(
        self, name: str, placement: Sequence[int], replicas: Sequence[int] = ()
    ) -> list[float]:
        """Return the sum of one field over the stages of each rank; each replica counts.

        >>> Costs(parameters=[1, 5]).per_rank("parameters", placement=(0, 2), replicas=(2, 1))
        [1.0, 1.0, 5.0]
        """
        counts = replicas or (1,) * len(placement)
        values = self.per_stage(name, len(placement))
        totals = [0.0] * max(map(sum, zip(placement, counts, strict=True)))
        for first, count, value in zip(placement, counts, values, strict=True):
            for rank in range(first, first + count):
                totals[rank] += value
        return totals

    def static(self, placement: Sequence[int], replicas: Sequence[int] = ()) -> list[float]:
        """Return what each rank always holds: parameters, gradients and optimizer state."""
        fields = ("parameters", "gradients", "optimizer_state")
        parts = (self.per_rank(name, placement, replicas) for name in fields)
        return [sum(sizes) for sizes in zip(*parts, strict=True)]

    def check_num_stages(self, num_stages: int) -> None:
        """Raise `CostsError` if a field has another number of values."""
        for name in PER_STAGE:
            self.per_stage(name, num_stages)

    def is_set(self, name: str) -> bool:
        """Return whether a field is positive on any stage."""
        value: float | tuple[float, ...] = getattr(self, name)
        return any(value) if isinstance(value, tuple) else value > 0

    def link(self, source: int, target: int) -> Link:
        """Return the link from one rank to another; from a rank to itself it is free."""
        if isinstance(self.links, Link):
            return self.links if source != target else Link()
        return self.links.get((source, target), Link())

    def _check_lengths(self) -> None:
        lengths = {
            name: len(value)
            for name in PER_STAGE
            if isinstance(value := getattr(self, name), tuple)
        }
        if len(set(lengths.values())) > 1:
            seen = ", ".join(f"{name} {length}" for name, length in lengths.items())
            raise CostsError(f"lengths differ ({seen}), but every list needs one value per stage")

    def _check_retained(self) -> None:
        length = max(
            (len(v) for v in (self.activation, self.retained) if isinstance(v, tuple)), default=1
        )
        pairs = zip(
            self.per_stage("retained", length), self.per_stage("activation", length), strict=True
        )
        for stage, (retained, activation) in enumerate(pairs):
            if retained > activation:
                raise CostsError(
                    f"retained is {retained} on stage {stage}, but it is the part of activation "
                    f"that W needs: use at most {activation}, its activation"
                )

    def _check_links(self) -> None:
        links = self.links if isinstance(self.links, Mapping) else {(0, 1): self.links}
        for pair, link in links.items():
            is_pair = isinstance(pair, tuple) and [type(rank) for rank in pair] == [int, int]
            if not is_pair or not isinstance(link, Link):
                raise CostsError(
                    f"links contains {shown(pair)}: {shown(link)}, but must have a Link for each "
                    "(from, to) pair of ranks, or be one Link for all"
                )


PER_STAGE = tuple(f.name for f in fields(Costs) if f.name != "links")
UNIT = ("forward", "input_grad", "weight_grad", "activation")  # 1 by default
BETWEEN_STAGES = ("transfer", "message", "links")  # not divided over the chunks of a rank


def read_costs(path: Path) -> dict[str, Any]:
    """Return the costs in a JSON file, by name; raise `CostsError` if one is not known."""
    return costs_of_json(read_json(path, CostsError), str(path))


def costs_of_json(values: object, source: str) -> dict[str, Any]:
    """Return costs by name from a JSON object; `source` is what errors call it.

    >>> costs_of_json({"forward": 1.5, "links": {"latency": 0.1}}, "costs.json")
    {'forward': 1.5, 'links': Link(latency=0.1, bandwidth=inf)}
    """
    if not isinstance(values, dict):
        raise CostsError(f"{source} holds {type(values).__name__}, but costs are a JSON object")
    unknown = sorted(set(values) - set(Costs.__dataclass_fields__))
    if unknown:
        known = ", ".join(Costs.__dataclass_fields__)
        raise CostsError(f"{source} has {', '.join(map(shown, unknown))}, but costs are {known}")
    if isinstance(values.get("links"), dict):
        return values | {"links": _link(source, values["links"])}
    return values


def _link(source: str, values: dict[str, Any]) -> Link:
    if not values.keys() <= Link.__dataclass_fields__.keys():
        raise CostsError(
            f"{source} has links {shown(values)}, but a link is a latency and a bandwidth"
        )
    return Link(**values)


def _numbers(name: str, value: object) -> float | tuple[float, ...]:
    """Return a float or a tuple of floats; raise `CostsError` for anything else."""
    value = _without_array(name, value)
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return tuple(_number(f"{name}[{stage}]", item) for stage, item in enumerate(value))
    return _number(name, value)


@runtime_checkable
class _Array(Protocol):
    """The arrays, tensors and scalars of numpy and torch."""

    def tolist(self) -> object: ...


def _without_array(name: str, value: object) -> object:
    """Return an array or tensor as Python numbers, and anything else unchanged."""
    if isinstance(value, int | float | list | tuple | None) or not isinstance(value, _Array):
        return value
    try:
        return value.tolist()
    except Exception as error:  # a tensor on the meta device, or a user's own class
        raise CostsError(
            f"{name} is {shown(value)}, which cannot be converted to numbers: {error}"
        ) from error


def _number(name: str, value: object) -> float:
    value = _without_array(name, value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CostsError(f"{name} is {shown(value)}, but a cost is a number >= 0")
    if not 0 <= value < math.inf:
        raise CostsError(f"{name} is {shown(value)}, but a cost is a finite number >= 0")
    if value and not LEAST_AMOUNT <= value <= MOST_AMOUNT:
        raise CostsError(
            f"{name} is {shown(value)}, but a cost is 0, or from {LEAST_AMOUNT:g} to "
            f"{MOST_AMOUNT:g}: use other units"
        )
    return float(value)
