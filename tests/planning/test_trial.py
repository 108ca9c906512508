"""The trial pipeline of a profile: calibrated layers, what the host takes, and how plans use it."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.planning.small_layers import SAMPLES, WIDTH, cluster_of, linear, profile_of
from torch import nn
from torch.nn.functional import mse_loss

import stageline as sl
from stageline.planning.cluster.cluster import Level
from stageline.planning.partition.stage_times import StageTimes, stage_times
from stageline.planning.profiling.profile import profile
from stageline.planning.profiling.profile_result import LayerCost, Measurement, Profile
from stageline.planning.profiling.time_layers import ActionSeconds
from stageline.planning.profiling.trial.calibrate import calibrate
from stageline.planning.profiling.trial.stage_overheads import (
    NO_HOST_COSTS,
    NO_OVERHEADS,
    ActionOverheads,
    HostCosts,
)
from stageline.planning.profiling.trial.trial_pipeline import TrialStep, host_costs, summarize
from stageline.runtime.engine.minibatch import RecordedAction
from stageline.schedules.action import Action, Kind
from stageline.zoo.cases import make_case


def layers_profile(**options: Any) -> Profile:
    model = nn.Sequential(*(linear() for _ in range(4)))
    inputs, target = torch.randn(4 * SAMPLES, WIDTH), torch.randn(4 * SAMPLES, WIDTH)
    return profile(model, inputs, loss_fn=mse_loss, target=target, repeats=2, **options)


def test_several_ranks_measure_what_the_host_takes() -> None:
    found = layers_profile(ranks=2)
    assert found.host.step > 0
    assert found.host.handoff > 0
    assert found.host.action > 0
    assert found.measurements[0].overheads.forward > 0


def test_one_rank_has_overheads_but_no_trial() -> None:
    found = layers_profile(ranks=1)
    assert found.host == NO_HOST_COSTS
    assert found.measurements[0].overheads.forward > 0


@pytest.mark.parametrize(
    "name",
    [
        "gpt",
        "resnet",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("unet", "branches")),
    ],
)
def test_models_with_tied_weights_skips_and_batch_norm_are_tried(name: str) -> None:
    case = make_case(name)
    inputs, target = case.batches[0]
    options: dict[str, Any] = {"loss_fn": case.loss_fn, "target": target, "repeats": 1, "ranks": 2}
    assert profile(case.layers, inputs, **options).host.step > 0


def test_a_model_of_fewer_layers_than_ranks_or_without_a_loss_is_not_tried() -> None:
    inputs = torch.randn(SAMPLES, WIDTH)
    assert profile([linear(), linear()], inputs, repeats=1, ranks=2).host == NO_HOST_COSTS
    given: dict[str, Any] = {"loss_fn": mse_loss, "target": inputs, "repeats": 1, "ranks": 2}
    assert profile([linear()], inputs, **given).host == NO_HOST_COSTS


def test_the_threads_of_a_trial_end_with_it() -> None:
    before = set(threading.enumerate())  # pipelines of other tests may still have theirs
    layers_profile(ranks=2)
    assert set(threading.enumerate()) <= before


def test_a_file_without_the_new_fields_is_read(tmp_path: Path) -> None:
    new = layers_profile(ranks=2)
    old = replace(
        new,
        host=NO_HOST_COSTS,
        measurements=tuple(replace(each, overheads=NO_OVERHEADS) for each in new.measurements),
    )
    path = tmp_path / "profile.json"
    new.save(path)
    assert Profile.load(path) == new
    old.save(path)
    data = json.loads(path.read_text(encoding="utf-8"))
    del data["host"]
    for measurement in data["measurements"]:
        del measurement["overheads"]
    path.write_text(json.dumps(data), encoding="utf-8")
    assert Profile.load(path) == old


def recorded(
    stage: int, microbatch: int, asked_and_sent: tuple[float, float], ran: tuple[float, float]
) -> RecordedAction:
    return RecordedAction(Action(stage, Kind.F, microbatch), *asked_and_sent, *ran)


def test_gaps_handoffs_and_time_outside_of_actions() -> None:
    first = [recorded(0, 0, (1, 0), (1, 2)), recorded(0, 1, (2.25, 0), (2.5, 4))]
    second = [recorded(1, 0, (1, 2), (3, 5)), recorded(1, 1, (5.25, 4), (5.5, 7))]
    step = summarize([first, second], seconds=8.0)
    assert step.actions == {(Kind.F, 0): 1.25, (Kind.F, 1): 1.75}
    assert step.action_gap == 0.5  # 0F1 and 1F1, whose message was there
    assert step.handoff == 1.0  # 1F0 waited for a message that was sent at 2
    assert step.outside == 2.0  # actions ran from 1 to 7
    assert host_costs([step]) == HostCosts(0.5, 1.0, 2.0)


def test_stages_of_calibrated_layers_take_what_the_trial_took() -> None:
    alone = [ActionSeconds(*(n + 1.0 for _ in range(5))) for n in range(3)]
    overhead = ActionSeconds(0.5, 0.25, 0.5, 0.25, 0.125)
    kinds = {"whole": (Kind.F, Kind.B), "halves": (Kind.F, Kind.I, Kind.W)}
    steps = [
        TrialStep({(kind, stage): 2.0 + stage for kind in row for stage in (0, 1)}, 0, 0, 0)
        for row in kinds.values()
    ]
    found = calibrate(alone, overhead, [range(2), range(2, 3)], [steps])
    costs = tuple(LayerCost(t.forward, t.backward, 0, 0, 0, 0, 0) for t in found)
    measured = Measurement(1, costs, (), ActionOverheads(*overhead[:-1]))
    whole = [stage_times(measured, layers, in_halves=False) for layers in (range(2), range(2, 3))]
    assert [times.forward for times in whole] == pytest.approx([2.0, 3.0])
    assert [times.input_grad for times in whole] == pytest.approx([2.0, 3.0])
    assert calibrate(alone, overhead, (), ()) == alone


def test_i_and_w_have_their_own_times() -> None:
    layer = LayerCost(1, 2, 3, 0, 0, 0, 0, halving=1.0, halving_input=0.75, halving_weight=-0.25)
    found = Measurement(1, (layer, layer), ())
    assert stage_times(found, range(2), in_halves=True) == StageTimes(3.0, 5.5, 5.5, 2.0)
    assert stage_times(found, range(2), in_halves=False) == StageTimes(2.0, 4.0, 6.0, 2.0)


def test_an_overhead_never_makes_a_stage_shorter_than_a_layer() -> None:
    tiny = (LayerCost(1, 1, 1, 0, 0, 0, 0),) * 4
    found = Measurement(1, tiny, (), ActionOverheads(forward=0.875, backward=5.0))
    assert stage_times(found, range(4), in_halves=False) == StageTimes(1.375, 1.0, 1.0, 1.375)


def test_a_plan_counts_gaps_handoffs_and_the_host_of_a_step() -> None:
    options: dict[str, Any] = {"batch_size": 4, "num_ranks": 2, "schedules": ["gpipe"]}
    free = profile_of([1.0, 1.0], message=1.0)
    host = HostCosts(action=0.01, handoff=0.05, step=0.5)
    before, after = (
        sl.plan(each, cluster_of(2), **options) for each in (free, replace(free, host=host))
    )
    # 5 forwards and 5 backwards are on the longest path, and one handoff each way
    longer = 10 * 0.01 + 2 * (0.05 - 0.01) + 0.5
    assert before.chosen.num_microbatches == after.chosen.num_microbatches == 4
    assert after.chosen.seconds == pytest.approx(before.chosen.seconds + longer)
    assert after.timeline.makespan == pytest.approx(1e3 * (after.chosen.seconds - 0.5))


def test_links_of_a_cluster_replace_the_handoff_of_threads() -> None:
    profiled = replace(profile_of([1.0, 1.0], message=10.0), host=HostCosts(handoff=0.05))
    linked = cluster_of(2, levels=(Level("machine", 2, bandwidth=1000.0),))
    plan = sl.plan(profiled, linked, batch_size=4, num_ranks=2)
    assert plan.costs["transfer"][0] == pytest.approx(10 / 1000)


def test_a_plan_says_that_transfers_count_as_free() -> None:
    profiled = profile_of([1.0, 1.0], message=10.0)
    plan = sl.plan(profiled, cluster_of(2), batch_size=4, num_ranks=2)
    assert "transfers between ranks and reductions over replicas count as free" in str(plan)
    assert "the cluster has no levels of links" in str(plan)
    handed = replace(profiled, host=HostCosts(handoff=2e-4))
    assert "transfers between ranks count as 200 µs whatever their size" in str(
        sl.plan(handed, cluster_of(2), batch_size=4, num_ranks=2)
    )
    linked = cluster_of(2, levels=(Level("machine", 2, bandwidth=1000.0),))
    for silent in (
        sl.plan(profiled, linked, batch_size=4, num_ranks=2),
        sl.plan(profiled, cluster_of(1), batch_size=4),
    ):
        assert "no levels" not in str(silent)


def test_replicas_without_links_say_so_too() -> None:
    plan = sl.plan(profile_of([1.0]), cluster_of(2), batch_size=4)
    assert plan.chosen.replicas == 2
    assert "count as free" in str(plan)
