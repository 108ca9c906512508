"""From layers to stages: what each stage of a cut costs in time and memory.

kept from F to I    what its layers wrote and save, what it reads from other stages, and what it
                    keeps only because it is sent
kept from I to W    the part of that which its own weight gradients need, and gradients that wait
recomputed          only what it reads from other stages; the rest comes back for a moment
offloaded           nothing; two micro-batches for a moment, as one comes or leaves beside the other
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from stageline.costs import Costs, Link
from stageline.errors import PlanError
from stageline.planning.cluster.cluster import Cluster, Device
from stageline.planning.profiling.profile import Measurement, Tied, ValueCost
from stageline.schedules.placement import Placement, Replicas, side_by_side

STATES = {"sgd": 0, "momentum": 1, "adagrad": 1, "adam": 2, "adamw": 2}  # tensors a parameter


@dataclass(frozen=True)
class Cut:
    """Layers cut into stages, and on which ranks they are."""

    balance: tuple[int, ...]
    placement: Placement
    recompute: tuple[bool, ...]  # by stage
    offload: bool = False  # to the host, what is not recomputed
    is_tight: bool = False  # made to fit, not to be even

    @property
    def is_plain(self) -> bool:
        return not self.offload and not any(self.recompute)

    @property
    def stages(self) -> list[range]:
        return [range(*pair) for pair in pairwise(accumulate(self.balance, initial=0))]

    @property
    def homes(self) -> list[int]:
        """By layer, its stage."""
        return [stage for stage, layers in enumerate(self.stages) for _ in layers]


@dataclass(frozen=True)
class Machines:
    """What the ranks of a pipeline run on: for each the worst of its devices in all replicas.

    By default the ranks of a replica are neighbours. Links are those of the first replica. Where
    stages have replicas, a rank counts as the worst of its stage, and so do links between stages.
    """

    cluster: Cluster
    devices: tuple[Device, ...]  # by rank
    numbers: tuple[range, ...]  # by rank, of its devices in the cluster, by replica
    by_stage: bool = False  # these are the devices of its stage

    @staticmethod
    def of(
        cluster: Cluster, num_ranks: int, replicas: int, *, side_by_side: bool = False
    ) -> Machines:
        """`side_by_side`: the replicas of a rank are neighbours instead."""
        numbers = tuple(
            range(rank * replicas, (rank + 1) * replicas)
            if side_by_side
            else range(rank, num_ranks * replicas, num_ranks)
            for rank in range(num_ranks)
        )
        return Machines(cluster, _worst_devices(cluster, numbers), numbers)

    @staticmethod
    def of_stages(cluster: Cluster, replicas: Replicas) -> Machines:
        """With so many ranks for each stage, which are neighbours."""
        firsts = side_by_side(replicas)
        numbers = tuple(
            range(first, first + count)
            for first, count in zip(firsts, replicas, strict=True)
            for _ in range(count)
        )
        return Machines(cluster, _worst_devices(cluster, numbers), numbers, by_stage=True)

    def link(self, source: int, target: int) -> Link:
        """Between two ranks; or between those of their stages that are furthest apart."""
        here, there = self.numbers[source], self.numbers[target]
        if self.by_stage:
            ends = (here[0], here[-1], there[0], there[-1])
            return self.cluster.link(min(ends), max(ends))
        return self.cluster.link(here[0], there[0])

    def ring(self, rank: int) -> Link:
        """The slowest of those that join its replicas: no two are further apart than the ends."""
        return self.cluster.link(self.numbers[rank][0], self.numbers[rank][-1])

    def summing(self, rank: int) -> tuple[float, float]:
        """Seconds to sum gradients over its replicas in a ring: at least, and for every byte."""
        link, replicas = self.ring(rank), len(self.numbers[rank])
        share = 2 * (replicas - 1) / replicas
        return link.latency * (replicas > 1), share / link.bandwidth


def _worst_devices(cluster: Cluster, numbers: Sequence[Sequence[int]]) -> tuple[Device, ...]:
    if not cluster.devices:  # all are alike
        return (cluster.device(0),) * len(numbers)
    return tuple(_worst([cluster.device(number) for number in row]) for row in numbers)


def _worst(devices: Sequence[Device]) -> Device:
    return Device(min(d.memory_bytes for d in devices), min(d.speed for d in devices))


@dataclass(frozen=True)
class Traffic:
    """Bytes of a micro-batch that pass between stages."""

    read: list[float]  # by stage: what comes from others
    unsaved: list[float]  # by stage: what it keeps because it is sent
    sent: dict[tuple[int, int], float]  # by writer and reader stage
    retained: list[float]  # by stage: what it keeps until W beyond what its layers say, or less

    @staticmethod
    def of(values: Iterable[ValueCost], homes: Sequence[int]) -> Traffic:
        count = homes[-1] + 1
        read, unsaved, retained = [0.0] * count, [0.0] * count, [0.0] * count
        sent: dict[tuple[int, int], float] = {}
        for value in values:
            if value.writer < 0:
                continue  # every rank has what the loader brings
            writer = homes[value.writer]
            if all(homes[reader] == writer for reader in value.readers):
                continue  # it stays in its stage
            readers = {homes[reader] for reader in value.readers} - {writer}
            for reader in readers:
                read[reader] += value.size
                sent[writer, reader] = sent.get((writer, reader), 0.0) + value.size
            unsaved[writer] += value.unsaved
            needed = {homes[n] for n in (value.writer, *value.readers) if n not in value.let_go}
            for reader in readers & needed:
                retained[reader] += value.size
            if needed and writer not in needed:  # its layer counts what anybody needs
                retained[writer] -= value.size
        return Traffic(read, unsaved, sent, retained)


def stage_costs(
    measurement: Measurement,
    tied: Sequence[Tied],
    cut: Cut,
    machines: Machines,
    *,
    in_halves: bool,
    optimizer: str,
) -> Costs:
    """`in_halves` if the schedule has I and W: then forwards take longer, and gradients wait."""

    def sums(name: str) -> list[float]:
        return [measurement.over(stage, name) for stage in cut.stages]

    traffic = Traffic.of(measurement.values, cut.homes)
    speeds = [machines.devices[rank].speed for rank in cut.placement]
    forward, halving, inputs, weights = (
        _over(sums(name), speeds) for name in ("forward", "halving", "input_grad", "weight_grad")
    )
    held = Held.of(sums("activation"), sums("retained"), sums("waiting"), traffic, cut)
    learned = _learned(sums("parameters"), tied, cut)
    forwards = [f + h * in_halves for f, h in zip(forward, halving, strict=True)]
    if cut.offload:  # a copy that takes longer than what goes on beside it holds that up
        copies = [size / machines.cluster.host_bandwidth for size in held.whole]
        forwards = [max(pair) for pair in zip(forwards, copies, strict=True)]
        rows = zip(inputs, weights, copies, strict=True)
        inputs = [max(own, copy - other) for own, other, copy in rows]
    return Costs(
        forward=forwards,
        input_grad=inputs,
        weight_grad=weights,
        transfer=_transfers(traffic, cut.placement, machines),
        activation=held.until_gradient,
        retained=held.until_weights,
        waiting=[size * in_halves for size in held.between],
        recompute=[f * again for f, again in zip(forward, cut.recompute, strict=True)],
        working_set=[
            brought + measurement.momentary(stage)
            for brought, stage in zip(held.for_a_moment, cut.stages, strict=True)
        ],
        parameters=[a + b for a, b in zip(learned, sums("buffers"), strict=True)],
        gradients=sums("parameters"),
        optimizer_state=[states_of(optimizer) * size for size in learned],
    )


@dataclass(frozen=True)
class Held:
    """Bytes of a micro-batch that stages hold: by stage."""

    whole: list[float]  # all that its backward needs
    until_gradient: list[float]  # from F to I
    until_weights: list[float]  # the part of that which stays until W
    between: list[float]  # from I to W only
    for_a_moment: list[float]  # while I or B runs

    @staticmethod
    def of(
        activation: list[float],
        retained: list[float],
        waiting: list[float],
        traffic: Traffic,
        cut: Cut,
    ) -> Held:
        whole, first, last, between, moment = [], [], [], [], []
        for stage, again in enumerate(cut.recompute):
            read = traffic.read[stage]
            kept = activation[stage] + read + traffic.unsaved[stage]
            needed = min(max(0.0, retained[stage] + traffic.retained[stage]), kept)
            stays = read if again else 0.0 if cut.offload else kept
            # beside what is in use, one more comes or leaves
            brought = 2 * kept if cut.offload and not again else kept - stays
            whole.append(0.0 if again else kept)
            first.append(stays)
            last.append(min(needed, stays))
            between.append(waiting[stage] + needed - last[-1])  # what was brought back stays
            moment.append(brought)
        return Held(whole, first, last, between, moment)


def states_of(optimizer: str) -> int:
    """Tensors that it keeps for each parameter, of the parameter's own type as torch's do."""
    if optimizer not in STATES:
        raise PlanError(f"optimizer is {optimizer!r}, but has to be one of {', '.join(STATES)}")
    return STATES[optimizer]


def _over(times: Sequence[float], speeds: Sequence[float]) -> list[float]:
    return [time / speed for time, speed in zip(times, speeds, strict=True)]


def _learned(parameters: Sequence[float], tied: Sequence[Tied], cut: Cut) -> list[float]:
    """Bytes of parameters; of a tied weight a rank holds one, with its first layer."""
    sizes = list(parameters)
    homes = cut.homes
    for weight in tied:
        seen = set()
        for layer in weight.layers:
            stage = homes[layer]
            if cut.placement[stage] in seen:
                sizes[stage] -= weight.parameters
            seen.add(cut.placement[stage])
    return sizes


def reductions(costs: Costs, placement: Placement, machines: Machines) -> tuple[float, ...]:
    """By stage, seconds in which its gradients are summed over all replicas, in a ring."""
    gradients = costs.per_stage("gradients", len(placement))
    rates = (machines.summing(rank) for rank in placement)
    return tuple(
        fixed + per_byte * size for (fixed, per_byte), size in zip(rates, gradients, strict=True)
    )


def _transfers(traffic: Traffic, placement: Placement, machines: Machines) -> list[float]:
    """By writing stage: until its slowest reader has what it wrote."""
    times = [0.0] * len(placement)
    for (writer, reader), size in traffic.sent.items():
        link = machines.link(placement[writer], placement[reader])
        times[writer] = max(times[writer], link.latency + size / link.bandwidth)
    return times
