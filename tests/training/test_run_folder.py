"""What `sl.fit` writes to its folder beside checkpoints and metrics, and when."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stageline as sl
from stageline.runs.read import read_run

DATA = [(torch.ones(4, 4), torch.zeros(4, 1))] * 3


def pipeline(**options: Any) -> sl.Pipeline:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    sizes: dict[str, Any] = {"num_ranks": 2, "num_microbatches": 2, "backend": "serial"}
    return sl.Pipeline(model, nn.functional.mse_loss, **sizes | options)


def fit(folder: Path, steps: int = 6, data: Any = DATA, **options: Any) -> sl.Pipeline:
    pipe = pipeline(**options)
    optimizer = torch.optim.SGD(pipe.parameters(), 0.1)
    sl.fit(pipe, data, optimizer, steps=steps, folder=folder, save_every=4, report_every=2)
    return pipe


def events(folder: Path) -> list[tuple[str, int, str]]:
    return [(event.kind, event.step, event.message) for event in read_run(folder).events]


class FailingLoader:
    """Gives two batches, and fails with the third."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __iter__(self) -> Iterator[Any]:
        yield from DATA[:2]
        raise self.error


def test_folder_says_what_ran_and_on_what(tmp_path: Path) -> None:
    def half(target: torch.Tensor) -> float:
        return len(target) / 2

    fit(tmp_path, options=sl.Options(seed=3, count_fn=half), recompute="always")
    run = read_run(tmp_path)
    made = run.configuration
    assert (made.schedule, made.num_ranks, made.num_microbatches) == ("1f1b", 2, 2)
    assert (made.balance, made.layers, made.num_parameters) == ((1, 2), ("0", "1", "2"), 49)
    assert (made.backend, made.optimizer, made.recompute) == ("serial", "SGD", ("always",) * 2)
    assert made.options["seed"] == "3"
    assert made.options["count_fn"].endswith("half")
    assert run.environment.torch == torch.__version__
    assert run.environment.devices == ("cpu", "cpu")
    assert run.metrics[-1].batch_size == 4
    assert run.notes == ()


def test_last_recorded_step_is_stored_action_by_action(tmp_path: Path) -> None:
    pipe = fit(tmp_path, recompute="always")
    run = read_run(tmp_path)
    assert (run.measured_step, len(run.measured)) == (6, 3)
    assert run.measured[-1].balance == pipe.balance
    for time in run.breakdown:
        assert {"forward", "recomputation", "backward", "optimizer"} <= time.parts.keys()
        assert sum(time.parts.values()) >= run.measured[-1].makespan * 0.99


def test_plan_is_simulated_beside_what_was_measured(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    profile = sl.estimate(model, torch.ones(2, 4), flops=1e9, bandwidth=1e9)
    plan = sl.plan(profile, sl.Cluster(num_devices=2, memory="1GiB"), batch_size=4, num_ranks=2)
    pipe = sl.Pipeline(model, nn.functional.mse_loss, plan=plan, backend="serial")
    optimizer = torch.optim.SGD(pipe.parameters(), 0.1)
    sl.fit(pipe, DATA, optimizer, steps=2, folder=tmp_path)
    run = read_run(tmp_path)
    assert run.configuration.plan is not None
    assert run.configuration.plan.description == plan.chosen.description
    assert run.predicted is not None
    assert run.predicted.makespan == pytest.approx(plan.timeline.makespan)
    assert run.predicted.schedule == run.measured[-1].schedule


def test_checkpoints_and_the_end_are_events(tmp_path: Path) -> None:
    fit(tmp_path)
    assert events(tmp_path) == [
        ("started", 0, ""),
        ("checkpoint saved", 4, "step-00000004"),
        ("checkpoint saved", 6, "step-00000006"),
        ("finished", 6, ""),
    ]
    run = read_run(tmp_path)
    assert (run.status, run.checkpoints) == ("finished", (4, 6))


def test_error_that_ends_a_run_is_an_event(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no such image"):
        fit(tmp_path, data=FailingLoader(OSError("no such image")))
    assert events(tmp_path)[-1] == ("failed", 2, "OSError: no such image")
    assert read_run(tmp_path).status == "failed"


def test_interrupted_run_says_so_and_the_next_one_resumes(tmp_path: Path) -> None:
    data = [*DATA, *DATA]
    fit(tmp_path, steps=4, data=data)
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, steps=9, data=FailingLoader(KeyboardInterrupt()))
    assert read_run(tmp_path).status == "interrupted"
    fit(tmp_path, steps=6, data=data)
    run = read_run(tmp_path)
    assert (run.status, run.resumed_from, run.step) == ("finished", 4, 6)
    kinds = [event.kind for event in run.events if event.kind != "checkpoint saved"]
    assert kinds == ["started", "finished", "started", "interrupted", "started", "finished"]


def test_run_that_was_done_already_leaves_its_record(tmp_path: Path) -> None:
    fit(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.glob("*.json*")}
    fit(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.glob("*.json*")} == before


def test_run_without_end_is_recorded_like_others(tmp_path: Path) -> None:
    pipe = pipeline()
    optimizer = torch.optim.SGD(pipe.parameters(), 0.1)
    never: dict[str, Any] = {"steps": 10**20, "save_every": 10**20, "report_every": 10**20}
    never["max_norm"] = torch.tensor(1.0)
    data = FailingLoader(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        sl.fit(pipe, data, optimizer, folder=tmp_path, **never)
    run = read_run(tmp_path)
    assert (run.status, run.configuration.max_norm, run.notes) == ("interrupted", 1.0, ())


class Warns(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        warnings.warn("the learning rate is high", UserWarning, stacklevel=1)
        return x


def test_warnings_are_events_once_and_still_shown(tmp_path: Path) -> None:
    pipe = sl.Pipeline(
        nn.Sequential(nn.Linear(4, 1), Warns()),
        nn.functional.mse_loss,
        num_ranks=2,
        num_microbatches=2,
        backend="threads",
    )
    shown = warnings.showwarning
    with pytest.warns(UserWarning, match="the learning rate is high"):
        sl.fit(pipe, DATA, torch.optim.SGD(pipe.parameters(), 0.1), steps=3, folder=tmp_path)
    pipe.close()
    assert [event.message for event in read_run(tmp_path).warnings] == ["the learning rate is high"]
    assert warnings.showwarning is shown


def test_stream_has_metrics_and_events_and_no_recorded_step(tmp_path: Path) -> None:
    pipe = pipeline(
        schedule="pipedream", optimizer_fn=lambda weights: torch.optim.SGD(weights, 0.1)
    )
    sl.fit(pipe, DATA, None, steps=6, folder=tmp_path, save_every=4, report_every=2)
    run = read_run(tmp_path)
    assert [line.step for line in run.metrics] == [2, 4, 6]
    assert (run.status, run.measured, run.breakdown) == ("finished", (), ())


def test_time_spent_waiting_for_the_loader_is_measured(tmp_path: Path) -> None:
    fit(tmp_path)
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    parts = last["data_seconds"] + last["optimizer_seconds"] + last["save_seconds"]
    assert all(0 < part < last["step_seconds"] for part in parts)
