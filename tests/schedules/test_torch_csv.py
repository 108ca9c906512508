"""Files go both ways between Stageline and torch.distributed.pipelining.

Torch's schedules are real ones, on a process group of four that only pretends to communicate.
"""

import csv
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.pipelining as torch_pipelining
from torch.distributed.pipelining import schedules as torch_schedules
from torch.testing._internal.distributed.fake_pg import FakeStore

from stageline.errors import ScheduleError
from stageline.schedules.action import Kind
from stageline.schedules.build import build_schedule, schedule_names
from stageline.schedules.check import check
from stageline.schedules.edges import chain
from stageline.schedules.program.lower import lower
from stageline.schedules.schedule import Schedule
from stageline.simulation.simulate import simulate

NUM_RANKS, NUM_MICROBATCHES = 4, 8
pipelining: Any = torch_pipelining  # most of it is private and has no types
schedules: Any = torch_schedules

every_name = pytest.mark.parametrize("name", schedule_names(synchronous=True))
OF_SEVERAL_STAGES = {
    "ScheduleInterleaved1F1B": (0, 4),  # the stages of rank 0
    "ScheduleLoopedBFS": (0, 4),
    "ScheduleInterleavedZeroBubble": (0, 4),
    "ScheduleZBVZeroBubble": (0, 7),
    "ScheduleDualPipeV": (0, 7),
}


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=NUM_RANKS, store=FakeStore())
    yield
    dist.destroy_process_group()


def torch_stages(stages: tuple[int, ...], num_stages: int) -> list[Any]:
    """Return the stages of rank 0; what they compute does not matter."""
    return [
        pipelining.PipelineStage(torch.nn.Identity(), stage, num_stages, torch.device("cpu"))
        for stage in stages
    ]


def torch_schedule(name: str, num_microbatches: int = NUM_MICROBATCHES) -> Any:
    build = getattr(schedules, name)
    if name in OF_SEVERAL_STAGES:
        stages = torch_stages(OF_SEVERAL_STAGES[name], 2 * NUM_RANKS)
        return build(stages, num_microbatches, torch.nn.functional.mse_loss)
    (stage,) = torch_stages((0,), NUM_RANKS)
    return build(stage, num_microbatches, torch.nn.functional.mse_loss)


def dumped(name: str, folder: Path, num_microbatches: int = NUM_MICROBATCHES) -> Path:
    """Write the compute order; torch has no method for schedules with one stage per rank."""
    path = folder / f"{name}.csv"
    schedule = torch_schedule(name, num_microbatches)
    if name in OF_SEVERAL_STAGES:
        schedule._dump_csv(path, format="compute_only")
    else:
        schedules.PipelineScheduleMulti._dump_csv(schedule, path)
    return path


def torch_runtime(schedule: Schedule) -> Any:
    stages = torch_stages(schedule.stages_of(0), schedule.num_stages)
    return schedules._PipelineScheduleRuntime(stages, schedule.num_microbatches)


def cells(path: Path) -> list[list[str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.reader(file))


def names(rows: dict[int, list[Any]]) -> list[list[str]]:
    return [[str(action) for action in rows[rank]] for rank in sorted(rows)]


# Ours, read by torch.


@every_name
def test_torch_parses_every_cell_as_the_action_that_we_mean(tmp_path: Path, name: str) -> None:
    schedule = build_schedule(name, num_ranks=4, num_microbatches=8)
    schedule.to_csv(tmp_path / "ours.csv")
    parsed = [
        [schedules._Action.from_str(cell) for cell in row] for row in cells(tmp_path / "ours.csv")
    ]
    assert [[(a.stage_index, a.computation_type, a.microbatch_index) for a in row]
            for row in parsed] == [
        [(a.stage, a.kind, a.microbatch) for a in row] for row in schedule.actions
    ]  # fmt: skip


@every_name
def test_torch_loads_and_lowers_every_schedule(tmp_path: Path, name: str) -> None:
    schedule = build_schedule(name, num_ranks=4, num_microbatches=8)
    schedule.to_csv(tmp_path / "ours.csv")
    runtime = torch_runtime(schedule)
    runtime._load_csv(tmp_path / "ours.csv")
    assert names(runtime.pipeline_order) == cells(tmp_path / "ours.csv")
    assert runtime.stage_index_to_group_rank == dict(enumerate(schedule.placement))
    runtime._dump_csv(tmp_path / "lowered_by_torch.csv")
    assert Schedule.from_csv(tmp_path / "lowered_by_torch.csv") == schedule


@every_name
def test_torch_adds_the_messages_that_lower_adds(tmp_path: Path, name: str) -> None:
    schedule = build_schedule(name, num_ranks=4, num_microbatches=8)
    schedule.to_csv(tmp_path / "ours.csv")
    runtime = torch_runtime(schedule)
    runtime._load_csv(tmp_path / "ours.csv")
    for row, torch_row in zip(
        lower(schedule).actions, names(runtime.pipeline_order_with_comms), strict=True
    ):
        ours = {str(action) for action in row if action.kind is not Kind.STEP}
        assert ours == {cell for cell in torch_row if not cell.endswith("SHARD")}


@every_name
def test_torch_loads_every_program_but_for_its_optimizer_steps(tmp_path: Path, name: str) -> None:
    program = lower(build_schedule(name, num_ranks=4, num_microbatches=8))
    runtime = torch_runtime(program.schedule)
    program.to_csv(tmp_path / "whole.csv")
    with pytest.raises(RuntimeError, match=r"^Invalid action string: \dSTEP, should be"):
        runtime._load_csv(tmp_path / "whole.csv", format="compute_comms")

    rows = tuple(tuple(a for a in row if a.kind is not Kind.STEP) for row in program.actions)
    replace(program, actions=rows).to_csv(tmp_path / "known.csv")
    runtime._load_csv(tmp_path / "known.csv", format="compute_comms")
    assert names(runtime.pipeline_order_with_comms) == cells(tmp_path / "known.csv")


def test_torch_takes_a_skip_for_a_message_to_the_neighbour() -> None:
    """Torch supports no others: only Stageline runs programs with skips."""
    schedule = build_schedule("gpipe", num_ranks=4, num_microbatches=1)
    program = lower(schedule, [*chain(4), (0, 3)])
    (skip,) = [a for a in program.actions[0] if a.kind is Kind.SEND_F and a.peer == 3]
    assert str(skip) == "0SEND_F0>3"
    assert str(schedules._Action.from_str(str(skip))) == "0SEND_F0"


# Torch's, read by us.


@pytest.mark.parametrize("name", ["ScheduleGPipe", *OF_SEVERAL_STAGES])
@pytest.mark.parametrize("num_microbatches", [8, 12])
def test_an_order_dumped_by_torch_is_sound_and_runs_to_its_end(
    tmp_path: Path, name: str, num_microbatches: int
) -> None:
    schedule = Schedule.from_csv(dumped(name, tmp_path, num_microbatches))
    check(schedule)
    check(lower(schedule))
    num_stages = 8 if name in OF_SEVERAL_STAGES else 4
    assert (schedule.num_ranks, schedule.num_stages) == (4, num_stages)
    assert schedule.num_microbatches == num_microbatches
    work = 3.0 * num_microbatches * (num_stages // 4)
    timeline = simulate(schedule)
    assert timeline.busy == (work,) * 4
    assert work < timeline.makespan < 2 * work


@pytest.mark.parametrize("name", OF_SEVERAL_STAGES)
def test_torchs_order_with_messages_and_sharding_is_the_same_schedule(
    tmp_path: Path, name: str
) -> None:
    compute = Schedule.from_csv(dumped(name, tmp_path))
    torch_schedule(name)._dump_csv(tmp_path / "whole.csv", format="compute_comms")
    assert any(cell.endswith("UNSHARD") for row in cells(tmp_path / "whole.csv") for cell in row)
    assert Schedule.from_csv(tmp_path / "whole.csv") == compute


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("ScheduleGPipe", "gpipe"),
        ("ScheduleInterleaved1F1B", "interleaved_1f1b"),
        ("ScheduleDualPipeV", "dualpipe_v"),
    ],
)
def test_torchs_order_is_ours(tmp_path: Path, name: str, ours: str) -> None:
    expected = build_schedule(ours, num_ranks=NUM_RANKS, num_microbatches=NUM_MICROBATCHES)
    assert Schedule.from_csv(dumped(name, tmp_path)) == expected


def test_zbv_of_torch_has_no_bubble_in_the_span_of_its_ranks(tmp_path: Path) -> None:
    assert simulate(Schedule.from_csv(dumped("ScheduleZBVZeroBubble", tmp_path))).span_bubble == 0


def test_1f1b_of_torch_counts_the_forwards_of_its_last_rank_from_one(tmp_path: Path) -> None:
    """Torch runs the right order, but `_get_pipeline_order` prints 3F1 3B0 … 3F8 3B7."""
    schedule = Schedule.from_csv(dumped("Schedule1F1B", tmp_path))
    expected = build_schedule("1f1b", num_ranks=NUM_RANKS, num_microbatches=NUM_MICROBATCHES)
    assert schedule.actions[:-1] == expected.actions[:-1]
    with pytest.raises(ScheduleError, match=r"^0F8 is missing, but 3F8 implies"):
        check(schedule)

    *rest, last = schedule.actions
    repaired = [a._replace(microbatch=a.microbatch - (a.kind is Kind.F)) for a in last]
    schedule = Schedule.of([*rest, repaired], schedule.placement)
    check(schedule)
    assert schedule == expected
