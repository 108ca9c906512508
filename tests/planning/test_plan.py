from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.planning.small_layers import cluster_of, profile_of
from torch import nn

import stageline as sl
from stageline.planning.cluster.cluster import Cluster, Device, Level
from stageline.planning.explain import explain
from stageline.planning.profiling.profile_result import (
    LayerCost,
    Measurement,
    Profile,
    ValueCost,
)
from stageline.planning.search.candidate_builder import CandidateBuilder
from stageline.planning.search.candidate_schedules import DEFAULT_SCHEDULES, build_sized
from stageline.planning.search.enumerate_candidates import enumerate_candidates
from stageline.planning.search.memory_check import excess_bytes, excess_bytes_from_fewer_ranks
from stageline.planning.search.predict_time import seconds_from_fewer_ranks
from stageline.planning.search.search import (
    FEW_RANKS,
    FEW_RANKS_ERROR,
    FOUND_BY_SEARCH,
    SHORT_RUN_MARGIN,
    PlanSearch,
)
from stageline.planning.search.search_result import verdict_on
from stageline.planning.search.training_layouts import PlanRequest

MIB = 2**20
TIMES = ("forward", "input_grad", "weight_grad")


def test_one_device_gets_all_layers() -> None:
    plan = sl.plan(profile_of([1, 2, 3]), cluster_of(1), batch_size=4)
    assert plan.balance == (3,)
    assert plan.chosen.seconds == pytest.approx(4 * 3 * 6)


def test_replicas_are_chosen_if_the_model_fits_and_a_pipeline_if_not() -> None:
    profile = profile_of([1.0] * 8, parameters=MIB)
    roomy = sl.plan(profile, cluster_of(4, "64MiB"), batch_size=16)
    assert (roomy.chosen.num_ranks, roomy.chosen.replicas) == (1, 4)
    tight = sl.plan(profile, cluster_of(4, "12MiB"), batch_size=16)  # 4 MiB a layer with AdamW
    assert tight.chosen.num_ranks == 4
    assert max(tight.peak_memory) <= 12 * MIB


def test_only_stages_that_lack_memory_are_recomputed() -> None:
    profile = profile_of([1.0] * 4, activation=MIB, parameters=MIB, message=MIB / 100)
    slow = (Level("wire", 4, bandwidth=MIB / 10),)  # so that no replicas are summed over it
    options: dict[str, Any] = {"batch_size": 8, "optimizer": "sgd", "schedules": ["1f1b"]}
    plan = sl.plan(profile, cluster_of(4, "5.1MiB", levels=slow), **options)
    assert plan.recompute == (True, False, False, False)  # 1f1b holds 4, 3, 2, 1 micro-batches
    roomy = sl.plan(profile, cluster_of(4, "6.1MiB", levels=slow), **options)
    assert not any(roomy.recompute)
    assert roomy.chosen.seconds < plan.chosen.seconds


def with_results(profile: Profile, *, results: float, time_saved: float) -> Profile:
    """Return the profile with costly operators in each layer."""
    (measurement,) = profile.measurements
    layers = tuple(
        replace(layer, results=results, time_saved=time_saved) for layer in measurement.layers
    )
    return replace(profile, measurements=(replace(measurement, layers=layers),))


@pytest.mark.parametrize(
    ("memory", "modes"),
    [
        ("6.1MiB", ("never",) * 4),  # weights and gradients of 1 MiB each, up to 4 activations
        ("5.1MiB", ("selective", "never", "never", "never")),
        ("4.1MiB", ("always", "selective", "never", "never")),
    ],
)
def test_a_stage_is_recomputed_selectively_if_that_is_enough(
    memory: str, modes: tuple[str, ...], tmp_path: Path
) -> None:
    """Half of the activations are results of costly operators, which take 0.9 of the forward."""
    profile = profile_of([1.0] * 4, activation=MIB, parameters=MIB, message=MIB / 100)
    profile = with_results(profile, results=MIB / 2, time_saved=0.9)
    slow = (Level("wire", 4, bandwidth=MIB / 10),)
    options: dict[str, Any] = {"batch_size": 8, "optimizer": "sgd", "schedules": ["1f1b"]}
    plan = sl.plan(profile, cluster_of(4, memory, levels=slow), **options)
    assert plan.recompute_modes == modes
    seconds = {"never": 0.0, "always": 1.0, "selective": 1.0 - 0.9}
    assert plan.costs["recompute"] == pytest.approx([seconds[mode] for mode in modes])
    plan.save(tmp_path / "plan.json")
    assert sl.Plan.load(tmp_path / "plan.json") == plan
    says_so = "1 stage recomputed selectively" in plan.chosen.description
    assert says_so is ("selective" in modes)


def test_a_way_that_recomputes_wholly_loses_to_one_that_does_selectively() -> None:
    profile = profile_of([1.0] * 4, activation=MIB, parameters=MIB)
    request = PlanRequest(profile, cluster_of(4, "1GiB"), 8, "sgd", 4, True)
    found = PlanSearch(request, ["1f1b"], lambda *_: None).run()[0]
    best, loser = (
        replace(found, candidate=replace(found.candidate, cut=cut))
        for cut in (
            replace(found.candidate.cut, recompute=(True,) * 4, selective=selective)
            for selective in ((True,) * 4, (True, True, True, False))
        )
    )
    assert verdict_on(loser, best).endswith("needs more recomputation to fit")
    assert not verdict_on(best, loser).endswith("needs more recomputation to fit")


def test_results_that_save_no_time_are_not_kept() -> None:
    profile = profile_of([1.0] * 4, activation=MIB, parameters=MIB, message=MIB / 100)
    profile = with_results(profile, results=MIB / 2, time_saved=0.0)
    options: dict[str, Any] = {"batch_size": 8, "optimizer": "sgd", "schedules": ["1f1b"]}
    plan = sl.plan(profile, cluster_of(4, "5.1MiB"), num_ranks=4, **options)
    assert plan.recompute_modes == ("always", "never", "never", "never")


def test_a_pipeline_recomputes_as_its_plan_does() -> None:
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(4)))
    profile = sl.profile(model, torch.randn(2, 128), sizes=[1], repeats=1)
    (measurement,) = with_results(profile, results=MIB / 10, time_saved=1e-9).measurements
    even = {"activation": MIB, "forward": 1e-3, "input_grad": 1e-3, "weight_grad": 1e-3}
    layers = tuple(replace(layer, **even) for layer in measurement.layers)
    profile = replace(profile, measurements=(replace(measurement, layers=layers),))
    options: dict[str, Any] = {"optimizer": "sgd", "schedules": ["1f1b"]}
    # a cut into 1 and 3 layers takes 3 MiB on the second rank, and weights take 0.1 MiB a layer
    plan = sl.plan(profile, cluster_of(2, "2.6MiB"), batch_size=2, num_ranks=2, **options)
    assert plan.recompute_modes == ("selective", "never")
    with sl.Pipeline(model, nn.functional.mse_loss, plan=plan) as pipe:
        pipe.verify(torch.randn(2, 128), torch.randn(2, 128))


def test_activations_are_offloaded_if_the_host_is_fast_enough() -> None:
    profile = profile_of([1.0] * 4, activation=MIB, parameters=MIB, message=MIB / 100)
    options: dict[str, Any] = {"batch_size": 8, "optimizer": "sgd", "schedules": ["1f1b"]}
    for bandwidth, is_offloaded in ((2 * MIB, True), (MIB / 4, False)):
        cluster = cluster_of(4, "5.1MiB", host_bandwidth=bandwidth)
        plan = sl.plan(profile, cluster, num_ranks=4, **options)
        assert plan.chosen.offload is is_offloaded
        assert any(plan.recompute) is not is_offloaded
        assert max(plan.peak_memory) <= 5.1 * MIB


def test_a_pipeline_offloads_activations_if_its_plan_does(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = profile_of([1.0] * 4, activation=MIB, parameters=MIB, message=MIB / 100)
    cluster = cluster_of(4, "5.1MiB", host_bandwidth=2 * MIB)
    options: dict[str, Any] = {"optimizer": "sgd", "schedules": ["1f1b"], "num_ranks": 4}
    plan = sl.plan(profile, cluster, batch_size=8, **options)
    asked: list[int] = []
    monkeypatch.setattr(
        "stageline.runtime.engine.assembly.HostMemory", lambda _, stage: asked.append(stage)
    )
    layers = [sl.Layer(f"layer{n}", nn.Linear(2, 2)) for n in range(4)]
    sl.Pipeline(layers, nn.functional.mse_loss, plan=plan, options=sl.Options(check_streams=True))
    assert asked == [0, 1, 2, 3]


def test_a_slow_device_gets_fewer_layers() -> None:
    devices = (Device("1TiB"), Device("1TiB", speed=0.5))
    cluster = Cluster(num_devices=2, devices=devices)
    profile = profile_of([1.0] * 9, parameters=1.0)
    plan = sl.plan(profile, cluster, batch_size=8, schedules=["1f1b"])
    assert plan.chosen.replicas == 1  # two would wait for the slow one
    assert plan.balance == (6, 3)


def test_no_other_schedule_is_faster_than_the_chosen_one() -> None:
    """Each schedule is planned on its own, and compared with the choice among all."""
    profile = profile_of([1.0, 1.5, 1.0, 2.0, 1.0, 1.0, 0.5, 1.0], activation=MIB, parameters=MIB)
    cluster = cluster_of(4, "28MiB")
    chosen = sl.plan(profile, cluster, batch_size=12)
    for name in DEFAULT_SCHEDULES:
        try:
            alone = sl.plan(profile, cluster, batch_size=12, schedules=[name])
        except sl.PlanError:
            continue
        assert alone.chosen.seconds >= chosen.chosen.seconds


def test_a_saved_plan_simulates_to_its_predicted_time(tmp_path: Path) -> None:
    profile = profile_of([1.0] * 6, activation=MIB, parameters=MIB, message=10.0)
    cluster = cluster_of(2, "1GiB", levels=(Level("wire", 2, 1e3, 1e-3),))
    plan = sl.plan(profile, cluster, batch_size=8, schedules=["zb_h1"])
    plan.save(tmp_path / "plan.json")
    again = sl.Plan.load(tmp_path / "plan.json")
    assert again == plan
    assert again.timeline.makespan == pytest.approx(1e3 * plan.chosen.seconds)
    assert again.timeline.peak_memory == pytest.approx(plan.peak_memory)


def test_a_pipeline_follows_its_plan() -> None:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(5)]
    model = nn.Sequential(*layers, nn.Linear(16, 1))
    x, y = torch.randn(8, 16), torch.randn(8, 1)
    mse = nn.functional.mse_loss
    profile = sl.profile(model, x, loss_fn=mse, target=y, repeats=1, progress=False)
    static = 4 * sum(p.nbytes for p in model.parameters())
    cluster = Cluster(num_devices=2, memory=0.8 * static)  # no device holds all of it
    plan = sl.plan(profile, cluster, batch_size=8)
    assert plan.chosen.num_ranks == 2
    pipe = sl.Pipeline(model, mse, plan=plan, backend="serial")
    assert [len(part) for part in pipe._session.assembly.layout.stages] == list(plan.balance)
    assert pipe.schedule == plan.schedule
    pipe.verify(x, y)


def test_explain_divides_the_difference_into_parts() -> None:
    profile = profile_of([0.010] * 4, activation=MIB, parameters=MIB)
    cluster = cluster_of(2, "13MiB")
    plan = sl.plan(profile, cluster, batch_size=8, schedules=["1f1b"])
    assert plan.chosen.num_ranks == 2
    slower = sl.Costs(forward=[25.0, 20.0], input_grad=22.0, weight_grad=20.0)  # ms
    found = explain(plan, [sl.simulate(plan.schedule, slower)])
    forwards = sl.Costs(forward=[25.0, 20.0], input_grad=20.0, weight_grad=20.0)
    assert found.predicted == pytest.approx(1e3 * plan.chosen.seconds)
    assert found.with_forwards == pytest.approx(sl.simulate(plan.schedule, forwards).makespan)
    assert found.with_backwards == pytest.approx(found.measured)
    assert "forwards +" in str(found)
    other = sl.build_schedule("1f1b", num_ranks=3, num_microbatches=8)
    with pytest.raises(sl.PlanError, match="not of a step of this plan's pipeline"):
        explain(plan, [sl.simulate(other)])


def test_the_predicted_timeline_is_drawn_over_the_median_step(tmp_path: Path) -> None:
    plan = sl.plan(profile_of([0.010] * 4), cluster_of(2), batch_size=8, num_ranks=2)
    steps = [sl.simulate(plan.schedule, sl.Costs(forward=time)) for time in (30.0, 20.0, 90.0)]
    found = explain(plan, steps)
    assert (found.overlay.predicted, found.overlay.measured) == (plan.timeline, steps[0])
    found.save(tmp_path / "overlay.svg")
    picture = (tmp_path / "overlay.svg").read_text()
    assert f">{plan.chosen.schedule}, predicted and measured in ms<" in picture
    assert f">{found}<" in picture
    assert str(found.overlay).endswith(str(found))


def test_a_plan_for_another_model_is_refused() -> None:
    plan = sl.plan(profile_of([1.0, 1.0]), cluster_of(1), batch_size=4)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    with pytest.raises(sl.PlanError, match="layer 0 is '0' here and 'layer0' there"):
        sl.Pipeline(model, nn.functional.mse_loss, plan=plan)


def test_arguments_that_contradict_the_plan_are_refused() -> None:
    plan = sl.plan(profile_of([1.0, 1.0]), cluster_of(1), batch_size=4)
    layers = [sl.Layer(f"layer{n}", nn.Linear(4, 4)) for n in range(2)]
    with pytest.raises(sl.PlanError, match="num_ranks is 2, but the plan says 1"):
        sl.Pipeline(layers, nn.functional.mse_loss, plan=plan, num_ranks=2)


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        (cluster_of(2, "1MiB"), "parameters, gradients and optimizer state take 16MiB"),
        (cluster_of(2, "17MiB"), "the closest is .* needs .*MiB .*: use devices with that much"),
    ],
)
def test_if_nothing_fits_the_error_names_the_closest_option(cluster: Cluster, message: str) -> None:
    profile = profile_of([1.0] * 8, parameters=MIB, activation=4 * MIB, message=2 * MIB)
    with pytest.raises(sl.PlanError, match=message):
        sl.plan(profile, cluster, batch_size=8)


def test_if_nothing_fits_the_error_names_the_stages_to_recompute() -> None:
    profile = profile_of([1.0] * 4, activation=MIB, parameters=MIB, message=MIB / 100)
    options: dict[str, Any] = {"batch_size": 8, "optimizer": "sgd", "schedules": ["1f1b"]}
    cluster = cluster_of(4, "5.1MiB")
    with pytest.raises(sl.PlanError, match=r": recompute stage 0, or use devices with that much"):
        sl.plan(profile, cluster, num_ranks=4, recompute=False, **options)


def test_the_rank_of_a_large_embedding_gets_fewer_layers_if_memory_is_short() -> None:
    layers = [LayerCost(0.1, 0.0, 0.1, 1, 0, 40, 0), *[LayerCost(1, 1, 1, 1, 0, 10, 0)] * 7]
    values = tuple(ValueCost(n, (n + 1,), 1.0) for n in range(7))
    profile = Profile(tuple("abcdefgh"), (Measurement(1, tuple(layers), values),))
    options: dict[str, Any] = {"batch_size": 8, "optimizer": "sgd", "num_ranks": 2}
    even = sl.plan(profile, cluster_of(2, "1KiB"), schedules=["1f1b"], **options)
    assert even.balance == (4, 4)
    tight = sl.plan(profile, cluster_of(2, 130), schedules=["1f1b"], **options)
    assert tight.balance == (3, 5)  # 2 · (40 + 2 · 10) bytes of weights, and 5 layers have 100
    assert max(tight.peak_memory) <= 130
    v = sl.plan(profile, cluster_of(2, 150), schedules=["zbv"], **options)
    assert max(v.peak_memory) <= 150


def test_the_cheaper_of_messages_and_reductions_crosses_the_slow_link() -> None:
    """A slow link between two machines carries either messages or sums of gradients."""
    levels = (Level("machine", 2, bandwidth=1e9), Level("site", 2, bandwidth=1e3))
    options: dict[str, Any] = {"batch_size": 8, "num_ranks": 2, "schedules": ["1f1b"]}
    large = profile_of([1.0] * 4, message=1e5, parameters=1.0)
    heavy = profile_of([1.0] * 4, message=1.0, parameters=1e5)
    for profile, side_by_side in ((large, False), (heavy, True)):
        plan = sl.plan(profile, cluster_of(4, levels=levels), **options)
        assert plan.chosen.side_by_side is side_by_side


@pytest.mark.parametrize("name", DEFAULT_SCHEDULES)
def test_a_short_run_bounds_the_time_of_a_long_one(name: str) -> None:
    """It bounds the memory too: the search excludes candidates by both."""
    rng = random.Random(name)
    for num_ranks in (2, 4):
        short = sl.build_schedule(name, num_ranks=num_ranks, num_microbatches=2 * num_ranks)
        stages = short.num_stages
        times = [[rng.uniform(0.5, 1.5) for _ in range(stages)] for _ in range(3)]
        given: dict[str, Any] = dict(zip(TIMES, times, strict=True))
        costs = sl.Costs(**given, transfer=rng.choice([0.0, 0.2]), activation=times[0])
        parts = [costs.per_rank(part, short.placement) for part in TIMES]
        busiest = max(map(sum, zip(*parts, strict=True)))
        for more in (num_ranks, 4 * num_ranks):
            count = 2 * num_ranks + more
            long = sl.build_schedule(name, num_ranks=num_ranks, num_microbatches=count)
            few, many = sl.simulate(short, costs), sl.simulate(long, costs)
            assert many.makespan >= SHORT_RUN_MARGIN * (few.makespan + more * busiest)
            for after, before in zip(many.peak_memory, few.peak_memory, strict=True):
                assert after >= before * (1 - 1e-9)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("1f1b", "zbv") else pytest.mark.slow)
        for name in DEFAULT_SCHEDULES
        if name not in FOUND_BY_SEARCH
    ],
)
def test_few_ranks_bound_the_time_and_memory_of_many(name: str) -> None:
    """The search excludes candidates by that, if they are too large to be simulated."""
    rng = random.Random(name)
    few, many, count = FEW_RANKS, 3 * FEW_RANKS, 6 * FEW_RANKS
    layers = [
        LayerCost(t, 1.3 * t, 0.8 * t, MIB, MIB, MIB, 0)
        for t in (rng.uniform(0.9, 1.1) for _ in range(4 * many))
    ]
    profile = Profile(tuple(map(str, range(4 * many))), (Measurement(1, tuple(layers), ()),))
    request = PlanRequest(profile, cluster_of(many, "1MiB"), count, "sgd", many, recompute=False)
    builder = CandidateBuilder(request)
    candidates = enumerate_candidates(builder, [name])
    candidate = next(each for each in candidates if each.layout.num_microbatches == count)
    small, large = (build_sized(name, ranks, 2 * ranks, candidate.chunks) for ranks in (few, many))
    devices = builder.devices(candidate.layout.grid)
    exact = excess_bytes(candidate, large, devices)
    scaled = excess_bytes_from_fewer_ranks(candidate, small, devices)
    assert 0 < (1 - FEW_RANKS_ERROR) * max(scaled) <= max(exact)
    seconds = seconds_from_fewer_ranks(candidate, small)
    assert (1 - FEW_RANKS_ERROR) * seconds <= sl.simulate(large, candidate.costs).makespan


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"balance": [0, 2]}, "has an invalid balance.0"),
        ({"surprise": 1}, "has an invalid surprise: unexpected keyword argument"),
        ({"peak_memory": [-1.0]}, "has an invalid peak_memory.0"),
        ({"selective": [True]}, "selective has a stage that recompute does not"),
        ({"selective": [True, False]}, "number of stages in selective is 2, but the plan's"),
    ],
)
def test_an_invalid_plan_file_is_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    path = tmp_path / "plan.json"
    sl.plan(profile_of([1.0, 1.0]), cluster_of(1), batch_size=4).save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(sl.PlanError, match=message):
        sl.Plan.load(path)


def test_invalid_plans_and_options_are_refused_in_python_too() -> None:
    plan = sl.plan(profile_of([1.0, 1.0]), cluster_of(1), batch_size=4)
    with pytest.raises(sl.PlanError, match=r"^Plan has an invalid balance.0: input should be"):
        replace(plan, balance=(0, 2))
    with pytest.raises(sl.PlanError, match=r"^PlanOption has an invalid bubble: .* \(got -0.5\)$"):
        replace(plan.chosen, bubble=-0.5)
    with pytest.raises(sl.PlanError, match=r"selective is 1, but .* recompute, which is 0"):
        replace(plan.chosen, selective=1)


def test_a_plan_file_of_before_selective_recomputation_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan = sl.plan(profile_of([1.0, 1.0]), cluster_of(1), batch_size=4)
    plan.save(path)
    fields = json.loads(path.read_text())
    for each in (fields, fields["chosen"], *fields["others"]):
        del each["selective"]
    path.write_text(json.dumps(fields))
    assert sl.Plan.load(path) == plan


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": 4, "optimizer": "magic"}, "optimizer is 'magic', but has to be one of"),
        ({"batch_size": 4, "schedules": ["2f2b"]}, "schedule '2f2b' is not known"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(sl.StagelineError, match=message):
        sl.plan(profile_of([1.0, 1.0]), cluster_of(2), **options)
