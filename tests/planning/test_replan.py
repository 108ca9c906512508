"""Which layers a replan moves for given times, and pipelines after a replan."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stageline as sl
from stageline.planning.profiling.profile_result import LayerCost, Measurement, Profile
from stageline.planning.replan import (
    MeasuredTimes,
    Replan,
    choose_replan,
    measured_times,
    slowest_replica_times,
)
from stageline.runtime.placement.move_layers import move_state
from stageline.zoo.cases import grouped
from stageline.zoo.gpt import Head, loss

NAMES = tuple(f"layer{number}" for number in range(8))


@pytest.fixture(autouse=True)
def one_thread_for_each_rank() -> Iterator[None]:
    """The bits of a sum depend on how many threads share it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def schedule_of(name: str, num_ranks: int = 2) -> sl.Schedule:
    return sl.build_schedule(name, num_ranks=num_ranks, num_microbatches=4)


def profile_of(times: list[float]) -> Profile:
    costs = tuple(LayerCost(t, t, t, 0, 0, 0, 0) for t in times)
    return Profile(tuple(f"layer{n}" for n in range(len(times))), (Measurement(1, costs, ()),))


def decided(
    times: list[float],
    balance: tuple[int, ...],
    schedule: str = "1f1b",
    profile: Profile | None = None,
    num_ranks: int = 2,
) -> Replan:
    """Return times of steps in which F, I and W of each stage took this long."""
    work = schedule_of(schedule, num_ranks)
    names = tuple(f"layer{n}" for n in range(sum(balance)))
    timeline = sl.simulate(work, sl.Costs(times, times, times))
    return choose_replan(work, balance, measured_times(work, balance, names, [timeline], profile))


def test_a_slow_device_gives_up_layers() -> None:
    """Nine layers that should take 1 each take 2 on the second rank: six and three are even."""
    found = decided([5.0, 8.0], (5, 4), profile=profile_of([1.0] * 9))
    assert found.new_balance == (6, 3)
    after = sl.simulate(schedule_of("1f1b"), sl.Costs([6.0, 6.0], [6.0, 6.0], [6.0, 6.0]))
    assert found.new_milliseconds == pytest.approx(after.makespan)


def test_a_device_three_times_slower_gets_a_third_of_the_layers() -> None:
    assert decided([4.0, 12.0], (4, 4), profile=profile_of([1.0] * 8)).new_balance == (6, 2)


def test_a_profile_distinguishes_the_layers_of_a_stage() -> None:
    """Without it, two layers would seem right for the last stage."""
    profile = profile_of([1, 1, 1, 1, 1, 1, 1, 5])
    assert decided([4.0, 8.0], (4, 4), profile=profile).new_balance == (6, 2)
    assert decided([4.0, 8.0], (4, 4)).new_balance == (5, 3)


def test_only_the_ratios_of_a_profile_matter() -> None:
    """So it may be of another device, or estimated."""
    profiles = [profile_of([unit] * 9) for unit in (1e-3, 1.0, 1e3)]
    found = {decided([5.0, 8.0], (5, 4), profile=profile) for profile in profiles}
    assert {each.new_balance for each in found} == {(6, 3)}


def test_two_stages_per_rank_distinguish_a_slow_layer_from_a_slow_device() -> None:
    """Rank 1 has stages 1 and 3: if one of them is slow, it is its layers, if both, their rank."""
    balance, even = (2, 2, 2, 2), profile_of([1.0] * 8)
    layers = decided([2.0, 6.0, 2.0, 2.0], balance, "interleaved_1f1b", even)
    device = decided([2.0, 6.0, 2.0, 6.0], balance, "interleaved_1f1b", even)
    assert loads([1, 1, 3, 3, 1, 1, 1, 1], layers.new_balance) == [6, 6]
    assert (device.new_balance[1], device.new_balance[3]) == (1, 1)  # 3 each, and the others 6


def loads(times: list[int], balance: tuple[int, ...]) -> list[int]:
    """Return times for two ranks with alternating stages."""
    ends = [0, *accumulate(balance)]
    stages = [sum(times[start:end]) for start, end in pairwise(ends)]
    return [sum(stages[0::2]), sum(stages[1::2])]


def test_an_even_pipeline_is_left_unchanged() -> None:
    found = decided([4.0, 4.1, 4.0], (2, 3, 3), num_ranks=3)
    assert not found.moves
    assert found.new_milliseconds == found.old_milliseconds
    told = "layers by stage: 2, 3, 3, unchanged: no balance was found that is 5 % faster"
    assert str(found) == told


def test_a_printed_replan_shows_the_balance_and_the_gain() -> None:
    """1F1B with two stages takes the first micro-batch's first stage more than the busiest rank."""
    assert str(decided([5.0, 8.0], (5, 4), profile=profile_of([1.0] * 9))) == (
        "layers by stage: 6, 3 instead of 5, 4\n"
        "a step should take 90 ms instead of 111 (-18.9 %), not counting transfers"
    )


def test_the_slowest_replica_of_a_stage_counts() -> None:
    replicas = [MeasuredTimes(sl.Costs([1.0, 5.0], [2.0, 2.0], [3.0, 3.0]), None)]
    replicas.append(MeasuredTimes(sl.Costs([4.0, 1.0], [2.0, 2.0], [3.0, 3.0]), None))
    assert slowest_replica_times(replicas).stages == sl.Costs([4.0, 5.0], [2.0, 2.0], [3.0, 3.0])


@pytest.mark.parametrize(
    ("timelines", "message"),
    [
        ([], "there is no timeline"),
        (sl.simulate(schedule_of("1f1b")), r"has to be a list or tuple: use \[timeline\]"),
        ([3], "a timeline is 3, but has to be a Timeline"),
        ([sl.simulate(schedule_of("1f1b", 3))], "not of a whole training step of this pipeline"),
        ([sl.simulate(schedule_of("zb_h1"))], "not of a whole training step of this pipeline"),
    ],
)
def test_timelines_of_another_pipeline_are_refused(timelines: Any, message: str) -> None:
    with pytest.raises(sl.PlanError, match=message):
        measured_times(schedule_of("1f1b"), (4, 4), NAMES, timelines, None)


def test_a_profile_of_another_model_is_refused() -> None:
    timeline = sl.simulate(schedule_of("1f1b"))
    with pytest.raises(sl.PlanError, match="profile is of a model with 3 layers"):
        measured_times(schedule_of("1f1b"), (4, 4), NAMES, [timeline], profile_of([1.0] * 3))


# pipelines in one process


def model() -> nn.Sequential:
    """Tied weights on the first and the last rank, dropout, and statistics with a counter."""
    torch.manual_seed(0)
    embedding = nn.Embedding(11, 8)
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.LayerNorm(8)) for _ in range(3)]
    return nn.Sequential(embedding, *blocks, nn.BatchNorm1d(5), Head(embedding))


def slow_first(pipe: sl.Pipeline) -> sl.Timeline:
    """Return a timeline as if the first rank were ten times slower than the others."""
    times = [10.0 if rank == 0 else 1.0 for rank in pipe.schedule.placement]
    return sl.simulate(pipe.schedule, sl.Costs(times, times, times))


def step(pipe: sl.Pipeline, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    x, y = torch.randint(0, 11, (2, 9, 5), generator=generator)
    pipe.step(x, y)


def trained(
    replan_after: int | None, **options: Any
) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Train six steps, one of them without an update; layers move after one of them."""
    made = model()
    pipe = sl.Pipeline(made, loss, num_microbatches=4, **grouped(options))
    optimizer = torch.optim.AdamW(pipe.parameters(), 1e-2)
    parameters = list(made.parameters())
    for number in range(6):
        step(pipe, number)
        if number != 2:  # the gradients of the third step wait for the fourth's
            pipe.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
        if number == replan_after:
            assert pipe.replan(optimizer, [slow_first(pipe)]).moves
    assert all(a is b for a, b in zip(parameters, made.parameters(), strict=True))
    state = optimizer.state_dict()["state"]
    found = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
    pipe.close()
    return found, list(state.values())


@pytest.mark.parametrize("backend", ["serial", "threads"])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zbv", "gpipe"])
def test_training_gives_the_same_bits_if_layers_move_midway(schedule: str, backend: str) -> None:
    options = {"num_ranks": 2, "schedule": schedule, "backend": backend}
    undisturbed, state = trained(None, **options)
    for replan_after in (0, 2):
        found, its_state = trained(replan_after, **options)
        assert all(torch.equal(found[name], undisturbed[name]) for name in undisturbed)
        for a, b in zip(its_state, state, strict=True):
            assert all(torch.equal(a[key], b[key]) for key in b)


def test_recomputation_and_what_was_observed_of_layers_survive_a_replan() -> None:
    pipe = sl.Pipeline(
        model(), loss, num_ranks=2, num_microbatches=4, recompute=["always", "never"]
    )
    optimizer = torch.optim.SGD(pipe.parameters(), 0.1)
    pipe.replan(optimizer, [slow_first(pipe)])
    assert pipe._session.assembly.settings.recompute == ("always", "never")
    pipe.verify(*torch.randint(0, 11, (2, 9, 5)))
    pipe.close()


def test_a_checkpoint_saved_after_a_replan_loads_into_another_pipeline(tmp_path: Path) -> None:
    pipe = sl.Pipeline(model(), loss, num_ranks=2, num_microbatches=4)
    optimizer = torch.optim.AdamW(pipe.parameters(), 1e-2)
    step(pipe, 0)
    optimizer.step()
    pipe.replan(optimizer, [slow_first(pipe)])
    sl.save(tmp_path, pipe, optimizer, step=1)
    other = sl.Pipeline(model(), loss, num_ranks=3, num_microbatches=4)
    others = torch.optim.AdamW(other.parameters(), 1e-2)
    sl.load(tmp_path, other, others)
    for each, its_optimizer in ((pipe, optimizer), (other, others)):
        its_optimizer.zero_grad()
        step(each, 1)
        its_optimizer.step()
    found, wanted = other.state_dict(), pipe.state_dict()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    pipe.close()
    other.close()


def test_an_optimizer_of_another_model_is_refused() -> None:
    pipe = sl.Pipeline(model(), loss, num_ranks=2, num_microbatches=4)
    timelines = [slow_first(pipe)]
    balance = pipe.balance
    with pytest.raises(sl.PlanError, match="that the pipeline does not have"):
        pipe.replan(torch.optim.SGD(model().parameters()), timelines)
    some = list(pipe.parameters())[1:]
    with pytest.raises(sl.PlanError, match=r"does not have '0\.weight'"):
        pipe.replan(torch.optim.SGD(some), timelines)
    with pytest.raises(sl.PlanError, match=r"does not have '0\.weight'"):
        pipe.replan(None, timelines)
    with pytest.raises(sl.PlanError, match="has to be a Optimizer"):
        pipe.replan("adamw", timelines)  # type: ignore[arg-type]
    assert pipe.balance == balance
    pipe.close()


def test_a_backward_across_a_replan_is_refused() -> None:
    pipe = sl.Pipeline(model(), loss, num_ranks=2, num_microbatches=4)
    optimizer = torch.optim.SGD(pipe.parameters(), 0.1)
    output = pipe(torch.randint(0, 11, (8, 5)))
    pipe.replan(optimizer, [slow_first(pipe)])
    with pytest.raises(sl.ModelError, match=r"call replan after backward\(\)"):
        output.sum().backward()
    pipe.close()


def test_optimizer_states_move_to_the_device_of_their_parameter_except_step_counts() -> None:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    optimizer = torch.optim.AdamW([parameter])
    optimizer.step()
    state, group = optimizer.state[parameter], optimizer.param_groups[0]
    move_state(state, group, torch.device("meta"))
    assert {key: tensor.device.type for key, tensor in state.items()} == {
        "step": "cpu",
        "exp_avg": "meta",
        "exp_avg_sq": "meta",
    }
    move_state(state, group | {"capturable": True}, torch.device("meta"))
    assert state["step"].device.type == "meta"
