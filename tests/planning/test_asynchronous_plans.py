"""Plans with asynchronous schedules and replicas of single stages."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.planning.small_layers import cluster_of, profile_of
from torch import nn

import stageline as sl
from stageline.planning.cluster.cluster import Cluster, Device, Level
from stageline.planning.explain import explain
from stageline.planning.partition.pipedream_graph import read_graph, to_profile
from stageline.planning.partition.rank_devices import RankDevices
from stageline.planning.partition.stage_replicas import (
    compositions,
    cut_by_pipedream,
    replicated_cuts,
    round_up_microbatches,
)
from stageline.planning.search.candidate_schedules import build_sized
from stageline.planning.search.search import SHORT_RUN_MARGIN
from stageline.planning.stream_period import min_period, min_time_per_microbatch, period_of

MIB = 2**20
VGG16 = Path(__file__).parents[1] / "figures" / "vgg16.graph.txt"
HEAVY_FIRST = [9.0, 1.0, 1.0, 1.0]
VGG16_WIRE = (Level("machine", 4, 1e9),)
STREAMS = sl.schedule_names(synchronous=False)


def profile_with_weights(times: list[float], **options: float) -> sl.Profile:
    return profile_of(times, **{"parameters": 1.0} | options)


def wired(num_devices: int, bandwidth: float, memory: float | str = "1TiB") -> Cluster:
    return cluster_of(num_devices, memory, levels=(Level("wire", num_devices, bandwidth, 0.1),))


def all_periods(times: list[float], ring: float, message: float, batch: int) -> Iterator[float]:
    """Yield the simulated periods of all cuts, replicas and micro-batch sizes on 4 ranks.

    A sum over r replicas takes 0.1 + 2 (r - 1) / r · `ring` for each layer, a message 0.1 more
    than `message` for each sample.
    """
    for replicas in compositions(4):
        for inner in combinations(range(1, len(times)), len(replicas) - 1):
            stages = list(pairwise((0, *inner, len(times))))
            for samples in (1, 2, batch):
                count = round_up_microbatches(replicas, -(-batch // samples))
                if len(replicas) == 1 or count > batch:
                    continue
                size = -(-batch // count)
                work = [size * sum(times[a:b]) for a, b in stages]
                summed = [
                    (r > 1) * 0.1 + 2 * (r - 1) / r * (b - a) * ring
                    for r, (a, b) in zip(replicas, stages, strict=True)
                ]
                transfer = 0.1 + size * message
                costs = sl.Costs(work, work, work, transfer=transfer, reduce=summed)
                schedule = sl.build_schedule(
                    "pipedream",
                    num_ranks=4,
                    num_microbatches=count,
                    num_minibatches=5 + 16 // count,
                    replicas=replicas if max(replicas) > 1 else None,
                )
                yield period_of(sl.simulate(schedule, costs), count)


@pytest.mark.parametrize("times", [HEAVY_FIRST, [2.0, 6.0, 1.0, 1.0]])
def test_no_other_cut_or_number_of_replicas_is_faster(times: list[float]) -> None:
    profile = profile_with_weights(times, parameters=30.0, message=10.0)
    plan = sl.plan(profile, wired(4, 100.0), batch_size=3, num_ranks=4, schedules=["pipedream"])
    assert plan.chosen.seconds == pytest.approx(min(all_periods(times, 0.3, 0.1, 3)))
    assert plan.chosen.schedule == "pipedream"


@pytest.fixture(scope="module")
def replicated() -> sl.Plan:
    """Return a plan with two stages, on 3 and 1 of 4 ranks."""
    options: dict[str, Any] = {"batch_size": 12, "num_ranks": 4, "schedules": ["pipedream"]}
    return sl.plan(profile_with_weights(HEAVY_FIRST), cluster_of(4), **options)


@pytest.fixture(scope="module")
def straight() -> sl.Plan:
    """Return a plan with two stages without replicas."""
    options: dict[str, Any] = {"batch_size": 4, "num_ranks": 2, "schedules": ["pipedream"]}
    return sl.plan(profile_with_weights([0.01] * 4), cluster_of(2), **options)


def test_heavy_first_layers_get_three_of_four_ranks() -> None:
    profile = profile_with_weights(HEAVY_FIRST)
    options: dict[str, Any] = {"batch_size": 12, "num_ranks": 4}
    plan = sl.plan(profile, cluster_of(4), schedules=["1f1b", "pipedream"], **options)
    assert plan.chosen.stage_replicas == plan.schedule.replicas == (3, 1)
    assert plan.balance == (1, 3)
    assert plan.chosen.seconds == pytest.approx(12 * 3 * sum(HEAVY_FIRST) / 4)  # nobody waits
    assert plan.chosen.bubble == pytest.approx(0.0, abs=1e-9)
    assert plan.chosen.description.startswith("pipedream on 4 ranks (3, 1 by stage), ")
    assert "pipedream: a step is the time from one mini-batch to the next" in str(plan)
    flushed = next(other for other in plan.others if other.schedule == "1f1b")
    assert flushed.seconds == pytest.approx(12 * 27)  # one rank has three quarters of the work


def test_there_may_be_more_ranks_than_layers() -> None:
    options: dict[str, Any] = {"batch_size": 12, "num_ranks": 4, "schedules": ["pipedream"]}
    plan = sl.plan(profile_with_weights([3.0, 1.0]), cluster_of(4), **options)
    assert plan.chosen.stage_replicas == (3, 1)


def test_the_number_of_micro_batches_is_a_multiple_of_the_replicas() -> None:
    plan = sl.plan(
        profile_with_weights(HEAVY_FIRST),
        cluster_of(4),
        batch_size=64,
        num_ranks=4,
        schedules=["pipedream"],
    )
    assert plan.chosen.stage_replicas == (3, 1)
    assert plan.chosen.num_microbatches % 3 == 0
    assert plan.chosen.num_microbatches * plan.chosen.samples == 66  # some have one less


def test_plans_are_synchronous_unless_asynchronous_schedules_are_named() -> None:
    plan = sl.plan(profile_with_weights(HEAVY_FIRST), cluster_of(4), batch_size=12, num_ranks=4)
    assert not any(option.is_asynchronous for option in (plan.chosen, *plan.others))
    assert plan.chosen.stage_replicas == ()
    assert "from one mini-batch to the next" not in str(plan)


def test_asynchronous_pipelines_have_no_replicas_of_the_whole_pipeline() -> None:
    """Two ranks on four devices need two replicas, so only synchronous schedules are left."""
    profile = profile_with_weights(HEAVY_FIRST)
    options: dict[str, Any] = {"batch_size": 12, "num_ranks": 2}
    with pytest.raises(sl.PlanError, match="no schedule can cut 4 layers for 4 devices"):
        sl.plan(profile, cluster_of(4), schedules=["pipedream"], **options)
    plan = sl.plan(profile, cluster_of(4), schedules=["1f1b", "pipedream"], **options)
    assert (plan.chosen.schedule, plan.chosen.replicas) == ("1f1b", 2)


def test_all_versions_of_weights_have_to_fit_in_memory() -> None:
    """With one micro-batch per mini-batch the first of 4 stages has 4 versions of its weights."""
    profile = profile_with_weights([1.0] * 4, parameters=MIB)
    options: dict[str, Any] = {"batch_size": 1, "optimizer": "sgd", "num_ranks": 4}
    roomy = sl.plan(profile, cluster_of(4, "5.5MiB"), schedules=["1f1b", "pipedream"], **options)
    assert roomy.chosen.schedule == "pipedream"
    assert roomy.peak_memory[0] == 5 * MIB  # and one of gradients
    tight = sl.plan(profile, cluster_of(4, "2.5MiB"), schedules=["1f1b", "pipedream"], **options)
    assert tight.chosen.schedule == "1f1b"


def test_both_versions_of_2bw_have_to_fit_in_memory() -> None:
    profile = profile_with_weights([1.0] * 4, parameters=MIB)
    options: dict[str, Any] = {"batch_size": 4, "optimizer": "sgd", "num_ranks": 4}
    both = sl.plan(profile, cluster_of(4, "3MiB"), schedules=["pipedream_2bw"], **options)
    assert set(both.peak_memory) == {3 * MIB}  # two versions, and gradients
    tight = sl.plan(profile, cluster_of(4, "2.9MiB"), schedules=[*STREAMS, "1f1b"], **options)
    assert not any(option.is_asynchronous for option in (tight.chosen, *tight.others))
    with pytest.raises(sl.PlanError, match=r"nothing fits .* needs 3MiB"):
        sl.plan(profile, cluster_of(4, "2.9MiB"), schedules=["pipedream_2bw"], **options)


def test_every_replica_needs_memory_for_its_whole_stage() -> None:
    """The third device is too small for the first layer with AdamW's states."""
    profile = profile_with_weights([9.0, 1.0, 1.0, 1.0, 1.0], parameters=MIB)
    options: dict[str, Any] = {"batch_size": 12, "num_ranks": 4, "schedules": ["pipedream"]}
    devices = tuple(Device(size) for size in ("64MiB", "64MiB", "4.5MiB", "64MiB"))
    plan = sl.plan(profile, Cluster(4, devices=devices), **options)
    assert plan.chosen.stage_replicas != (3, 1)
    for device, peak in zip(devices, plan.peak_memory, strict=True):
        assert peak <= device.memory_bytes


def test_little_memory_moves_layers_off_a_replicated_stage() -> None:
    profile = profile_with_weights([4.0, 4.0, 4.0, 1.0, 1.0, 1.0], parameters=MIB)
    options: dict[str, Any] = {"batch_size": 12, "num_ranks": 4, "optimizer": "sgd"}
    memory = 9.5 * MIB
    plan = sl.plan(profile, cluster_of(4, memory), schedules=["pipedream"], **options)
    assert max(plan.peak_memory) <= memory


def test_slow_gradient_reductions_rule_out_replicas() -> None:
    profile = profile_with_weights(HEAVY_FIRST, parameters=1000.0)
    options: dict[str, Any] = {"batch_size": 12, "num_ranks": 4, "schedules": ["pipedream"]}
    assert sl.plan(profile, wired(4, 1e6), **options).chosen.stage_replicas == (3, 1)
    assert sl.plan(profile, wired(4, 1.0), **options).chosen.stage_replicas == ()


def test_a_plan_with_replicas_is_read_back_from_its_file(tmp_path: Path) -> None:
    profile = profile_with_weights(HEAVY_FIRST, parameters=30.0, message=10.0)
    plan = sl.plan(profile, wired(4, 1e4), batch_size=12, num_ranks=4, schedules=STREAMS)
    plan.save(tmp_path / "plan.json")
    again = sl.Plan.load(tmp_path / "plan.json")
    assert again == plan
    assert again.schedule.replicas == (3, 1)
    milliseconds = period_of(again.timeline, plan.chosen.num_microbatches)
    assert milliseconds == pytest.approx(1e3 * plan.chosen.seconds)
    assert again.timeline.peak_memory == pytest.approx(plan.peak_memory)


def test_a_file_without_stage_replicas_is_read(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan = sl.plan(profile_with_weights([1.0, 1.0]), cluster_of(2), batch_size=4, num_ranks=2)
    plan.save(path)
    old = json.loads(path.read_text())
    for option in (old["chosen"], *old["others"]):
        del option["stage_replicas"]
    path.write_text(json.dumps(old))
    assert sl.Plan.load(path) == plan


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stage_replicas": [2, 1]}, r"stage_replicas is \[2, 1\], but 4 ranks .* add up to 4"),
        ({"stage_replicas": [3, 0, 1]}, "has an invalid chosen.stage_replicas.1"),
        ({"stage_replicas": [1, 3]}, r"is \[1, 3\], but the plan's actions have \[3, 1\]"),
        ({"stage_replicas": []}, r"is \[\], but the plan's actions have \[3, 1\]"),
        ({"num_microbatches": 4}, r"\[3, 1\], but 4 ranks and 4 micro-batches need numbers"),
        ({"schedule": "1f1b"}, r"\[3, 1\], but '1f1b' has one rank for each stage"),
        ({"replicas": 2}, "and replicas is 2"),
    ],
)
def test_a_file_with_invalid_stage_replicas_is_refused(
    tmp_path: Path, replicated: sl.Plan, change: dict[str, Any], message: str
) -> None:
    path = tmp_path / "plan.json"
    replicated.save(path)
    told = json.loads(path.read_text())
    path.write_text(json.dumps(told | {"chosen": told["chosen"] | change}))
    with pytest.raises(sl.PlanError, match=message):
        sl.Plan.load(path)


def test_an_asynchronous_pipeline_follows_its_plan_and_is_explained(straight: sl.Plan) -> None:
    torch.manual_seed(0)
    plan = straight
    layers = [sl.Layer(f"layer{n}", nn.Linear(4, 4)) for n in range(4)]
    pipe = sl.Pipeline(
        layers, nn.functional.mse_loss, plan=plan, optimizer_fn=lambda p: torch.optim.SGD(p, 0.1)
    )
    assert [len(part) for part in pipe._session.assembly.layout.stages] == list(plan.balance)
    assert pipe.schedule.name == "pipedream"
    batches = [(torch.ones(4, 4), torch.zeros(4, 4))] * 8
    with pipe.trace() as trace:
        losses = [float(result.loss) for result in pipe.run(batches)]
    timeline = trace.timeline
    assert losses[-1] < losses[0]
    found = explain(plan, [timeline])
    assert found.predicted == pytest.approx(1e3 * plan.chosen.seconds)
    assert found.measured == period_of(timeline, plan.chosen.num_microbatches)
    assert found.measured < timeline.makespan / 2  # of 8 mini-batches


def test_a_timeline_with_too_few_mini_batches_is_refused(straight: sl.Plan) -> None:
    sizes: dict[str, Any] = {"num_ranks": 2, "num_microbatches": straight.chosen.num_microbatches}
    short = sl.simulate(sl.build_schedule("pipedream", **sizes, num_minibatches=4))
    with pytest.raises(sl.PlanError, match="has 4 mini-batches, but at least 5"):
        explain(straight, [short])


def test_a_plan_with_stage_replicas_needs_a_process_for_each_rank(replicated: sl.Plan) -> None:
    layers = [sl.Layer(f"layer{n}", nn.Linear(4, 4)) for n in range(4)]
    with pytest.raises(sl.ModelError, match=r"replicas is \[3, 1\], .* a process for each"):
        sl.Pipeline(layers, nn.functional.mse_loss, plan=replicated, optimizer_fn=torch.optim.AdamW)


def test_the_plan_of_pipedream_for_vgg16_is_tried() -> None:
    """One micro-batch per mini-batch, as in PipeDream; its formula has twice a ring's bytes."""
    profile = to_profile(read_graph(VGG16))
    measurement = profile.at(1)
    twice = replace(
        measurement,
        layers=tuple(replace(la, parameters=2 * la.parameters) for la in measurement.layers),
    )
    cluster = cluster_of(4, levels=VGG16_WIRE)
    machines = RankDevices.of_stages(cluster, (1, 1, 1, 1))
    assert cut_by_pipedream(twice, machines, 1) == ((3, 1), (17, 23))
    assert ((3, 1), (17, 23)) in replicated_cuts(twice, cluster, 1, lambda replicas: (1, *replicas))


@pytest.mark.parametrize("batch_size", [3, 12])
def test_the_plan_for_vgg16_is_that_of_pipedream(batch_size: int) -> None:
    """The simulation counts the time of messages, but no queues of them."""
    profile = to_profile(read_graph(VGG16))
    options: dict[str, Any] = {"num_ranks": 4, "optimizer": "sgd", "schedules": ["pipedream"]}
    plan = sl.plan(profile, cluster_of(4, levels=VGG16_WIRE), batch_size=batch_size, **options)
    assert (plan.chosen.stage_replicas, plan.balance) == ((3, 1), (17, 23))
    assert plan.chosen.seconds <= batch_size * 0.205520896


def random_stream(rng: random.Random) -> tuple[tuple[int, ...], sl.Costs, list[float]]:
    """Return replicas, the costs of stages, and the work of each stage per micro-batch."""
    found = [each for each in compositions(rng.choice([2, 3, 4])) if len(each) > 1]
    replicas = rng.choice(found)
    forward = [count * rng.uniform(0.8, 1.2) for count in replicas]
    backward = [time * rng.uniform(0.8, 1.2) for time in forward]
    reduce = [rng.choice([0.0, 0.2, 2.0]) * (count > 1) for count in replicas]
    transfer = rng.choice([0.0, 0.1, 1.0])
    again = [rng.choice([0.0, time]) for time in forward]
    costs = sl.Costs(forward, backward, backward, transfer=transfer, reduce=reduce, recompute=again)
    work = [f + r + 2 * b for f, r, b in zip(forward, again, backward, strict=True)]
    return replicas, costs, work


def test_no_asynchronous_schedule_is_faster_than_its_bounds() -> None:
    """The bounds are that of cycles of waits, and that of a shorter run, which the search uses."""
    rng = random.Random(7)
    for _ in range(24):
        replicas, costs, took = random_stream(rng)
        stages, turn = len(replicas), round_up_microbatches(replicas, sum(replicas))
        work = np.array([took])
        sent = np.array([costs.per_stage("transfer", stages)[1:]])
        reduced, again = (np.array([costs.per_stage(n, stages)]) for n in ("reduce", "recompute"))
        periods = {}
        for count in (2 * turn, 4 * turn):
            stream = build_sized("pipedream", sum(replicas), count, 1, stage_replicas=replicas)
            periods[count] = period_of(sl.simulate(stream, costs), count)
            bound = min_period(work, sent, reduced, replicas, count, again)[0]
            assert periods[count] >= bound * (1 - 1e-9)
        pace = min_time_per_microbatch(work, sent, replicas, again)[0]
        assert periods[4 * turn] >= SHORT_RUN_MARGIN * (periods[2 * turn] + 2 * turn * pace)


def test_the_period_does_not_depend_on_the_number_of_mini_batches() -> None:
    rng = random.Random(3)
    for _ in range(6):
        replicas, costs, _ = random_stream(rng)
        count = round_up_microbatches(replicas, sum(replicas))
        stream = build_sized("pipedream", sum(replicas), count, 1, stage_replicas=replicas)
        long = sl.build_schedule(
            "pipedream",
            num_ranks=sum(replicas),
            num_microbatches=count,
            num_minibatches=25,
            replicas=replicas if max(replicas) > 1 else None,
        )
        paces = [period_of(sl.simulate(each, costs), count) for each in (stream, long)]
        assert paces[0] == pytest.approx(paces[1])
