"""Compute the time and memory of each stage of a cut from those of its layers.

kept from F to I    what its layers write and save, what it reads from other stages, and what it
                    keeps only because it is sent
kept from I to W    the part of that which its weight gradients need, and gradients that wait
recomputed          only what it reads from other stages; the rest is temporary
selectively         that, and the results of its costly operators, which do not run again
offloaded           nothing; two micro-batches are temporary: one is in use while another is copied
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, zip_longest
from typing import NamedTuple

from stageline.costs import Costs
from stageline.errors import PlanError
from stageline.planning.partition.rank_devices import RankDevices
from stageline.planning.partition.stage_times import stage_times
from stageline.planning.profiling.profile_result import Measurement, TiedParameter, ValueCost
from stageline.planning.profiling.trial.stage_overheads import NO_HOST_COSTS, HostCosts
from stageline.schedules.placement import Placement

OPTIMIZER_STATES = {"sgd": 0, "momentum": 1, "adagrad": 1, "adam": 2, "adamw": 2}


def modes_of(recompute: Sequence[bool], selective: Sequence[bool]) -> tuple[str, ...]:
    """Return how each stage is recomputed; `selective` may be empty if none is selectively.

    >>> modes_of((True, True, False), (True, False, False))
    ('selective', 'always', 'never')
    """
    return tuple(
        "selective" if is_selective else "always" if is_recomputed else "never"
        for is_recomputed, is_selective in zip_longest(recompute, selective, fillvalue=False)
    )


@dataclass(frozen=True)
class StageCut:
    """Layers cut into stages, the ranks of the stages, and how their memory is reduced."""

    balance: tuple[int, ...]
    placement: Placement
    recompute: tuple[bool, ...]  # by stage
    offload: bool = False  # move activations that are not recomputed to the host
    is_cut_for_memory: bool = False  # balanced as memory allows, not for speed alone
    selective: tuple[bool, ...] = ()  # by stage: recomputed selectively; (): none is

    @property
    def keeps_activations(self) -> bool:
        """True if nothing is recomputed or offloaded."""
        return not self.offload and not any(self.recompute)

    def is_selective(self, stage: int) -> bool:
        """Return whether a stage keeps the results of costly operators for its recomputation."""
        return bool(self.selective) and self.selective[stage]

    @property
    def recompute_modes(self) -> tuple[str, ...]:
        """The `recompute` argument of `sl.Pipeline`: a mode for each stage."""
        return modes_of(self.recompute, self.selective)

    @property
    def layers_by_stage(self) -> list[range]:
        return [range(*pair) for pair in pairwise(accumulate(self.balance, initial=0))]

    @property
    def stage_of_layer(self) -> list[int]:
        return [stage for stage, layers in enumerate(self.layers_by_stage) for _ in layers]


@dataclass(frozen=True)
class StageTraffic:
    """The bytes of a micro-batch that pass between stages."""

    read: list[float]  # by stage: received from other stages
    unsaved: list[float]  # by stage: kept only because it is sent
    sent: dict[tuple[int, int], float]  # by writing and reading stage
    retained: list[float]  # by stage: correction to the bytes that its layers keep until W

    @staticmethod
    def of(values: Iterable[ValueCost], stage_of_layer: Sequence[int]) -> StageTraffic:
        num_stages = stage_of_layer[-1] + 1
        read, unsaved, retained = [0.0] * num_stages, [0.0] * num_stages, [0.0] * num_stages
        sent: dict[tuple[int, int], float] = {}
        for value in values:
            if value.writer < 0:
                continue  # every rank has the model's inputs
            writer = stage_of_layer[value.writer]
            readers = {stage_of_layer[reader] for reader in value.readers} - {writer}
            if not readers:
                continue  # it stays in its stage
            for reader in readers:
                read[reader] += value.size
                sent[writer, reader] = sent.get((writer, reader), 0.0) + value.size
            unsaved[writer] += value.unsaved
            keepers = [n for n in (value.writer, *value.readers) if n not in value.let_go]
            needed = {stage_of_layer[number] for number in keepers}
            for reader in readers & needed:
                retained[reader] += value.size
            if needed and writer not in needed:  # the writer counts it if any layer needs it
                retained[writer] -= value.size
        return StageTraffic(read, unsaved, sent, retained)


def stage_costs(
    measurement: Measurement,
    tied: Sequence[TiedParameter],
    cut: StageCut,
    devices: RankDevices,
    *,
    in_halves: bool,
    optimizer: str,
    host: HostCosts = NO_HOST_COSTS,
) -> Costs:
    """Return the costs of the stages of a cut, in seconds and bytes.

    `in_halves` if the schedule has I and W: then forwards take longer, and gradients wait. What the
    host takes from one action to the next counts as part of the first of them.
    """

    def sums(name: str) -> list[float]:
        return [measurement.sum_over(layers, name) for layers in cut.layers_by_stage]

    traffic = StageTraffic.of(measurement.values, cut.stage_of_layer)
    times = [stage_times(measurement, each, in_halves=in_halves) for each in cut.layers_by_stage]
    gaps = (host.action, host.action, host.action * in_halves, 0.0)  # W is part of B if not split
    forwards, input_grad, weight_grad, recompute = (
        [t / devices.devices[r].speed + gap for t, r in zip(column, cut.placement, strict=True)]
        for column, gap in zip(zip(*times, strict=True), gaps, strict=True)
    )
    memory = StageMemory.of(LayerSums.of(measurement, cut), traffic, cut)
    parameters = _parameter_bytes(sums("parameters"), tied, cut)
    if cut.offload:  # a copy that takes longer than the work beside it delays the work
        copies = [size / devices.cluster.host_bandwidth for size in memory.backward_needs]
        forwards = [max(pair) for pair in zip(forwards, copies, strict=True)]
        rows = zip(input_grad, weight_grad, copies, strict=True)
        input_grad = [max(own, copy - other) for own, other, copy in rows]
    return Costs(
        forward=forwards,
        input_grad=input_grad,
        weight_grad=weight_grad,
        transfer=_transfer_seconds(traffic, cut.placement, devices, host),
        activation=memory.from_f_to_i,
        retained=memory.still_until_w,
        waiting=[size * in_halves for size in memory.from_i_to_w],
        recompute=_recompute_seconds(recompute, sums("time_saved"), cut, devices),
        working_set=[
            size + measurement.temporary_bytes(layers)
            for size, layers in zip(memory.temporary, cut.layers_by_stage, strict=True)
        ],
        parameters=[a + b for a, b in zip(parameters, sums("buffers"), strict=True)],
        gradients=sums("parameters"),
        optimizer_state=[num_optimizer_states(optimizer) * size for size in parameters],
    )


def _recompute_seconds(
    whole: Sequence[float], saved: Sequence[float], cut: StageCut, devices: RankDevices
) -> list[float]:
    """Return what each stage takes to recompute, 0 if it does not."""
    times = []
    for stage, (rank, is_recomputed) in enumerate(zip(cut.placement, cut.recompute, strict=True)):
        less = saved[stage] / devices.devices[rank].speed if cut.is_selective(stage) else 0.0
        times.append(max(0.0, whole[stage] - less) if is_recomputed else 0.0)
    return times


class LayerSums(NamedTuple):
    """The bytes of a micro-batch in the layers of each stage."""

    activation: list[float]
    retained: list[float]
    waiting: list[float]
    results: list[float]  # that a selective recomputation keeps, 0 for other stages
    beyond: list[float]  # what those of a layer take more than all that its backward needs

    @staticmethod
    def of(measurement: Measurement, cut: StageCut) -> LayerSums:
        def sums(name: str) -> list[float]:
            return [measurement.sum_over(layers, name) for layers in cut.layers_by_stage]

        results, beyond = [], []
        for stage, numbers in enumerate(cut.layers_by_stage):
            layers = (
                measurement.layers[numbers.start : numbers.stop] if cut.is_selective(stage) else ()
            )
            results.append(sum(layer.results for layer in layers))
            beyond.append(sum(max(0.0, layer.results - layer.activation) for layer in layers))
        return LayerSums(sums("activation"), sums("retained"), sums("waiting"), results, beyond)


@dataclass(frozen=True)
class StageMemory:
    """The bytes of a micro-batch that each stage keeps."""

    backward_needs: list[float]  # all that its backward needs, unless it is recomputed
    from_f_to_i: list[float]
    still_until_w: list[float]  # the part of that which is kept until W
    from_i_to_w: list[float]  # kept only from I to W
    temporary: list[float]  # while I or B runs

    @staticmethod
    def of(layers: LayerSums, traffic: StageTraffic, cut: StageCut) -> StageMemory:
        memory = StageMemory([], [], [], [], [])
        for stage, recomputed in enumerate(cut.recompute):
            activation, retained, waiting, results, beyond = (column[stage] for column in layers)
            read = traffic.read[stage]
            needed = activation + read + traffic.unsaved[stage]
            until_w = min(max(0.0, retained + traffic.retained[stage]), needed)
            kept = read + results if recomputed else 0.0 if cut.offload else needed
            # offloaded: while one micro-batch is in use, another is copied
            is_copied = cut.offload and not recomputed
            memory.backward_needs.append(0.0 if recomputed else needed)
            memory.from_f_to_i.append(kept)
            memory.still_until_w.append(min(until_w, kept))
            # what was recomputed or copied back for I stays until W
            memory.from_i_to_w.append(waiting + until_w - min(until_w, kept))
            most = needed + beyond
            memory.temporary.append(2 * needed if is_copied else most - kept)
        return memory


def num_optimizer_states(optimizer: str) -> int:
    """Return the number of tensors that an optimizer keeps per parameter, of its size and type."""
    if optimizer not in OPTIMIZER_STATES:
        raise PlanError(
            f"optimizer is {optimizer!r}, but has to be one of {', '.join(OPTIMIZER_STATES)}"
        )
    return OPTIMIZER_STATES[optimizer]


def reduction_seconds(
    costs: Costs, placement: Placement, devices: RankDevices
) -> tuple[float, ...]:
    """Return for each stage the time of a ring all-reduce of its gradients over all replicas."""
    gradients = costs.per_stage("gradients", len(placement))
    rates = (devices.all_reduce_seconds(rank) for rank in placement)
    return tuple(
        fixed + per_byte * size for (fixed, per_byte), size in zip(rates, gradients, strict=True)
    )


def _parameter_bytes(
    sizes: Sequence[float], tied: Sequence[TiedParameter], cut: StageCut
) -> list[float]:
    """Count a tied parameter once per rank, in the stage of its first layer there."""
    by_stage = list(sizes)
    stage_of_layer = cut.stage_of_layer
    for parameter in tied:
        ranks = set()
        for layer in parameter.layers:
            stage = stage_of_layer[layer]
            if cut.placement[stage] in ranks:
                by_stage[stage] -= parameter.parameters
            ranks.add(cut.placement[stage])
    return by_stage


def _transfer_seconds(
    traffic: StageTraffic, placement: Placement, devices: RankDevices, host: HostCosts
) -> list[float]:
    """Return for each stage the time until its slowest reader has received what it wrote.

    Without links in the cluster, ranks are taken for threads as those of the profile, which hand
    over a tensor of any size in the same time.
    """
    handoff = 0.0 if devices.cluster.levels else max(0.0, host.handoff - host.action)
    times = [0.0] * len(placement)
    for (writer, reader), size in traffic.sent.items():
        link = devices.link(placement[writer], placement[reader])
        seconds = link.latency + size / link.bandwidth
        if placement[writer] != placement[reader]:
            seconds = max(seconds, handoff)
        times[writer] = max(times[writer], seconds)
    return times
