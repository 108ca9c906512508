"""What a stage costs in time and memory: numbers, one for all stages or one for each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol, runtime_checkable

from stageline.arguments import check_size, shown
from stageline.errors import CostsError
from stageline.limits import LEAST_AMOUNT, MOST_AMOUNT, MOST_STAGES, check_most

PerStage = float | Sequence[float]


@dataclass(frozen=True)
class Link:
    """A one-way connection between two ranks: a fixed latency, then bytes over bandwidth.

    Messages on one link follow each other: the bytes of the second wait for those of the first.
    """

    latency: float = 0.0
    bandwidth: float = math.inf

    def __post_init__(self) -> None:
        object.__setattr__(self, "latency", _number("latency", self.latency))
        if not isinstance(self.bandwidth, float) or self.bandwidth != math.inf:
            object.__setattr__(self, "bandwidth", _number("bandwidth", self.bandwidth))
        if not self.bandwidth:
            raise CostsError("bandwidth is 0, but a link has to carry something: give more")


@dataclass(frozen=True)
class Costs:
    """Times and bytes of the stages of a pipeline, for one micro-batch.

    Each is a number, or one number per stage, in any unit that suits you. What a stage writes
    travels on, and its gradient back, in `transfer[stage]` plus what the link takes.

    >>> costs = Costs(forward=[1.0, 1.5], input_grad=2.0)
    >>> costs.per_stage("forward", 2), costs.per_stage("input_grad", 2)
    ((1.0, 1.5), (2.0, 2.0))
    """

    forward: PerStage = 1.0
    input_grad: PerStage = 1.0
    weight_grad: PerStage = 1.0
    transfer: PerStage = 0.0

    activation: PerStage = 1.0  # held from the start of F to the end of I (or B)
    retained: PerStage | None = (
        None  # the part of it still held until the end of W; all of it by default
    )

    waiting: PerStage = 0.0  # gradients held from the end of I to the end of W beside that

    recompute: PerStage = 0.0  # time to run the forward again, in front of I or B
    working_set: PerStage = 0.0  # held only while I or B runs: what recomputation brings back

    parameters: PerStage = 0.0  # of one version of the weights
    gradients: PerStage = 0.0
    optimizer_state: PerStage = 0.0

    message: PerStage = 0.0  # bytes that a stage sends on
    # one for all, or by (from, to) rank; a pair that is not named costs nothing
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
        """The costs of stages from those of a whole rank, which holds so many of them.

        A number is a rank's share of the model and is split evenly over its chunks, so that
        schedules with one chunk and with several are of the same model; a list has a value for
        each stage, and `transfer`, `message` and `links` are between stages: they stay as they are.
        What is not given is 1 for a rank where `Costs()` has 1 for a stage. The command line takes
        its costs so.

        >>> costs = Costs.of_a_rank(2, forward=1.1, transfer=0.05)
        >>> costs.forward, costs.input_grad, costs.transfer
        (0.55, 0.5, 0.05)
        """
        check_size("chunks_per_rank", chunks_per_rank)
        check_most("chunks_per_rank", chunks_per_rank, MOST_STAGES)
        if unknown := sorted(shares.keys() - {*PER_STAGE, "links"}):
            raise CostsError(
                f"{shown(unknown[0])} is given, but costs are {', '.join(PER_STAGE)} and links"
            )
        values = dict.fromkeys(UNIT, 1.0) | shares
        values.setdefault("retained", values["activation"])
        for name, value in values.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if name not in BETWEEN_STAGES and is_number:
                values[name] = _number(name, value) / chunks_per_rank
        return Costs(**values)

    def per_stage(self, name: str, num_stages: int) -> tuple[float, ...]:
        """The values of one field, spelled out for every stage."""
        if name not in PER_STAGE:
            raise CostsError(f"{shown(name)} is not known, but costs are {', '.join(PER_STAGE)}")
        value: float | tuple[float, ...] = getattr(self, name)
        if not isinstance(value, tuple):
            return (value,) * num_stages
        if len(value) != num_stages:
            raise CostsError(
                f"{name} has {len(value)} values, but the schedule has {num_stages} stages: "
                f"give one number, or {num_stages}"
            )
        return value

    def per_rank(
        self, name: str, placement: Sequence[int], replicas: Sequence[int] = ()
    ) -> list[float]:
        """The sum of one field over the stages of each rank; every replica of a stage counts.

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
        """By rank, what is held all the time: parameters, gradients and optimizer state."""
        fields = ("parameters", "gradients", "optimizer_state")
        parts = (self.per_rank(name, placement, replicas) for name in fields)
        return [sum(sizes) for sizes in zip(*parts, strict=True)]

    def check_num_stages(self, num_stages: int) -> None:
        """Raise if any field has another number of values."""
        for name in PER_STAGE:
            self.per_stage(name, num_stages)

    def is_set(self, name: str) -> bool:
        """Whether a field costs anything on any stage."""
        value: float | tuple[float, ...] = getattr(self, name)
        return any(value) if isinstance(value, tuple) else value > 0

    def link(self, source: int, target: int) -> Link:
        """The link from one rank to another; a rank reaches itself for nothing."""
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
                    f"retained is {retained} on stage {stage}, but it is the part of activation, "
                    f"{activation}, that W still needs: give at most that"
                )

    def _check_links(self) -> None:
        links = self.links if isinstance(self.links, Mapping) else {(0, 1): self.links}
        for pair, link in links.items():
            is_pair = isinstance(pair, tuple) and [type(rank) for rank in pair] == [int, int]
            if not is_pair or not isinstance(link, Link):
                raise CostsError(
                    f"links has {shown(pair)}: {shown(link)}, but holds a Link for each (from, to) "
                    "pair of ranks, or is one Link for all"
                )


PER_STAGE = tuple(f.name for f in fields(Costs) if f.name != "links")
UNIT = ("forward", "input_grad", "weight_grad", "activation")  # 1 unless given
BETWEEN_STAGES = ("transfer", "message", "links")  # no rank's share of anything


def _numbers(name: str, value: object) -> float | tuple[float, ...]:
    """A float, or a tuple of them; anything negative, infinite or not a number is refused."""
    value = _plain(name, value)
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return tuple(_number(f"{name}[{stage}]", item) for stage, item in enumerate(value))
    return _number(name, value)


@runtime_checkable
class _Array(Protocol):
    """What numpy and torch give: arrays, tensors, and their single numbers."""

    def tolist(self) -> object: ...


def _plain(name: str, value: object) -> object:
    """An array or tensor as numbers; anything else as it is."""
    if isinstance(value, int | float | list | tuple | None) or not isinstance(value, _Array):
        return value
    try:
        return value.tolist()
    except Exception as error:  # a tensor on the meta device, or a class of the user's own
        raise CostsError(f"{name} is {shown(value)}, which has no numbers: {error}") from error


def _number(name: str, value: object) -> float:
    value = _plain(name, value)
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
