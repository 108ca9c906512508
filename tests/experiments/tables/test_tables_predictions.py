"""Predictions of GPipe's tables: the order that is simulated, the cuts, and the memory."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from experiments.results import Results
from experiments.tables import gpipe_program, paper, predict, schedules
from experiments.tables.outcome import limit, predicted_throughput
from experiments.tables.predict import Cell
from experiments.tables.stages import (
    crossing_bytes,
    cut_by_parameters,
    cut_by_time,
    layers_by_stage,
    stage_costs,
)
from experiments.tables.workloads import GPU, TPU, Sample, Workload, images
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import stageline as sl
from stageline.zoo.amoebanet import amoebanet_d

FORWARD, BACKWARD, RECOMPUTE = 1.0, 2.0, 1.0


def even(num_ranks: int) -> sl.Costs:
    return sl.Costs([FORWARD] * num_ranks, BACKWARD / 2, BACKWARD / 2, recompute=RECOMPUTE)


def tiny() -> Sample:
    return images(amoebanet_d(num_classes=10, num_layers=3, num_filters=16), side=32)


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> sl.Profile:
    workload = Workload("tiny", TPU, 8, (4,), tiny)  # one size: seconds each
    return workload.profile(tmp_path_factory.mktemp("profiles"))


@pytest.mark.parametrize("num_microbatches", [1, 4, 32])
@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_a_step_with_equal_stages_takes_what_the_formula_says(
    num_ranks: int, num_microbatches: int
) -> None:
    """Recomputations are done while gradients are on their way: the bubble has F and B only."""
    work = num_microbatches * (FORWARD + RECOMPUTE + BACKWARD)
    bubble = (num_ranks - 1) * (FORWARD + BACKWARD)
    assert gpipe_program.makespan(even(num_ranks), num_microbatches) == work + bubble


@pytest.mark.parametrize("num_microbatches", [1, 4, 32])
@pytest.mark.parametrize("num_ranks", [2, 8])
def test_the_limit_is_what_the_simulator_says_of_equal_stages(
    num_ranks: int, num_microbatches: int
) -> None:
    step = predict.without_overlap(even(num_ranks), num_microbatches).makespan
    alone = num_microbatches * num_ranks * (FORWARD + RECOMPUTE + BACKWARD)
    assert alone / step == pytest.approx(limit(num_ranks, num_microbatches))


def test_a_link_that_is_a_rank_takes_as_long_as_a_link() -> None:
    """Slower and faster than the stages beside them: messages queue on the former."""
    for bandwidth in (0.5, 2.0, 100.0):
        link = sl.Link(bandwidth=bandwidth)
        costs = sl.Costs([1.0, 1.5, 0.5], 1, 1, recompute=[1, 1.5, 0.5], message=1, links=link)
        as_ranks = gpipe_program.with_links_as_ranks(costs)
        assert len(gpipe_program.per_stage(as_ranks, "forward")) == 5
        expected = gpipe_program.makespan(costs, 6)
        assert gpipe_program.makespan(as_ranks, 6) == pytest.approx(expected)


def test_a_cut_by_time_has_the_fastest_slowest_stage(profile: sl.Profile) -> None:
    times = [layer.time for layer in profile.at(2).layers]
    slowest = {first: max(sum(times[:first]), sum(times[first:])) for first in range(1, len(times))}
    first, _ = cut_by_time(profile, samples=2, num_ranks=2)
    assert slowest[first] == min(slowest.values())


def test_a_cut_by_parameters_leaves_most_of_the_work_to_the_first_stage(
    profile: sl.Profile,
) -> None:
    """Weights are in the last cells of AmoebaNet, and the time is spent in all of them."""
    by_time, by_parameters = (cut(profile, 2, 2)[0] for cut in (cut_by_time, cut_by_parameters))
    assert by_parameters > by_time


def test_stages_have_the_sums_of_their_layers_and_send_what_the_next_reads(
    profile: sl.Profile,
) -> None:
    balance = (4, len(profile.names) - 4)
    costs = stage_costs(profile, 2, balance, GPU)
    layers = profile.at(2).layers
    assert gpipe_program.per_stage(costs, "forward")[0] == pytest.approx(
        sum(layer.forward for layer in layers[:4])
    )
    # both inputs of the fifth layer come from before the cut, and one of the sixth's
    read = [value for value in profile.at(2).values if value.writer in (2, 3)]
    assert crossing_bytes(profile, 2, boundary=4) == sum(value.size for value in read)
    assert gpipe_program.per_stage(costs, "message")[-1] == 0
    assert layers_by_stage(balance)[1].stop == len(layers)


def test_the_largest_batch_fits_and_one_more_sample_a_micro_batch_does_not(
    profile: sl.Profile,
) -> None:
    small = TPU._replace(memory=20e6)
    cell = Cell(Workload("tiny", small, 8, (1, 4), tiny), num_ranks=2, num_microbatches=4)
    balance = cut_by_time(profile, 2, 2)
    samples = predict.largest_batch(cell, profile, balance) // 4
    assert samples >= 1
    peaks = [
        predict.peak_memory(stage_costs(profile, size, balance, small), 4)
        for size in (samples, samples + 1)
    ]
    assert peaks[0] <= small.memory < peaks[1]


def test_a_table_is_normalised_to_two_ranks_and_the_fewest_micro_batches() -> None:
    cell = Cell(Workload("some", TPU, 8, (1, 4), tiny), num_ranks=8, num_microbatches=4)
    runs = {"predict some K=2 M=1": {"step": 3.0}, f"predict {cell.name}": {"step": 1.5}}
    assert predicted_throughput(runs, cell) == 2.0


def test_a_prediction_is_made_once_and_its_stages_can_be_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, profile: sl.Profile
) -> None:
    workload = Workload("tiny", TPU, 8, (1, 4), tiny)
    monkeypatch.setattr(Workload, "profile", lambda *_: profile)
    cell, results = Cell(workload, 2, 4), Results(tmp_path / "results.json")
    predict.predict(results, cell)
    run = json.loads(results.path.read_text())[f"predict {cell.name}"]
    assert gpipe_program.makespan(predict.stored_costs(run), 4) == pytest.approx(run["step"])
    assert run["step"] <= run["step_without_overlap"]
    monkeypatch.setattr(predict, "predicted", lambda _: pytest.fail("it was made again"))
    predict.predict(results, cell)


def test_the_paper_has_its_figures_under_the_names_of_the_workloads() -> None:
    assert paper.throughput("AmoebaNet-D (18, 256)")[8, 32] == 3.48
    assert paper.throughput("Transformer-24") == {(2, 32): 1, (4, 32): 1.8, (8, 32): 3.3}
    assert paper.throughput("ResNet") == {}
    assert sum(paper.BREAKDOWN.values()) == pytest.approx(1)


@pytest.mark.parametrize("variant", schedules.VARIANTS, ids=lambda variant: variant.title)
def test_every_schedule_has_the_same_work(variant: schedules.Variant) -> None:
    """On each rank, for a micro-batch: a quarter of the layers, and again what is recomputed."""
    costs = replace(schedules.costs_of(variant), recompute=0.0)
    schedule = schedules.schedule_of(variant)
    busy = sl.simulate(schedule, costs).busy
    own = 3 * schedules.LAYERS / schedules.RANKS * schedules.SECONDS
    expected = [own * schedule.total_microbatches] * schedules.RANKS
    assert busy == pytest.approx(expected)


def test_simulated_schedules_rank_as_their_papers_say() -> None:
    found = {variant.title: schedules.simulated(variant) for variant in schedules.VARIANTS}
    rates = {title: run["rate"] for title, run in found.items()}
    peaks = {title: max(run["peaks"]) for title, run in found.items()}
    assert rates["GPipe"] == pytest.approx(rates["1F1B"])
    assert rates["1F1B"] < rates["interleaved 1F1B"] < rates["ZB-V"] < rates["PipeDream"]
    assert rates["PipeDream"] == pytest.approx(rates["PipeDream-2BW"])
    assert peaks["GPipe, recomputed"] < peaks["1F1B"] < peaks["PipeDream-2BW"] < peaks["PipeDream"]
    assert peaks["1F1B"] < peaks["GPipe"]


def test_a_layer_of_the_schedules_holds_what_their_costs_say() -> None:
    block = schedules.Block(0.0, floats=64)
    sizes = [parameter.numel() for parameter in block.parameters()]
    assert sum(sizes) == 2 * 64 + 1  # the emulated layer's own weight is one number
    saved: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.nbytes)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        block(torch.zeros(3, 64, 1, requires_grad=True))
    assert sorted(saved) == [4, 3 * 4 * 64]  # that weight, and what it is multiplied with
