from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
    EventAccumulator,
)
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

import stageline as sl
from stageline.training.metrics import num_tokens


class Stop(Exception):  # noqa: N818  no error: someone pulled the plug
    pass


class Loader:
    """Shuffles, and may stop the run after some batches."""

    def __init__(self, stop_after: int | None = None) -> None:
        x = torch.arange(76.0).reshape(19, 4).sin()
        self.loader = DataLoader(TensorDataset(x, x[:, :1]), batch_size=5, shuffle=True)
        self.left = stop_after

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            if self.left == 0:
                raise Stop
            self.left = None if self.left is None else self.left - 1
            yield batch


def trained(
    folder: Path | None, steps: int, stop_after: int | None = None, ranks: int = 2, **options: Any
) -> tuple[dict[str, Tensor], list[Any]]:
    """A run of its own, as of a script that is started again."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.BatchNorm1d(8), nn.Linear(8, 1))
    pipe = sl.Pipeline(
        model, nn.functional.mse_loss, num_ranks=ranks, num_microbatches=2, backend="serial"
    )
    optimizer = AdamW(pipe.parameters(), 1e-2)
    scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    torch.manual_seed(torch.initial_seed() + ranks)  # the caller's randomness is no part of it
    reports = sl.fit(
        pipe,
        Loader(stop_after),
        optimizer,
        steps=steps,
        folder=folder,
        save_every=3,
        report_every=2,
        scheduler=scheduler,
        max_norm=1.0,
        **options,
    )
    return pipe.state_dict(), reports


def interrupt(folder: Path, steps: int, stop_after: int) -> None:
    """Train until the loader raises; as at the end of a program, wait for a background save."""
    with pytest.raises(Stop):
        trained(folder, steps, stop_after)
    for thread in threading.enumerate():
        if thread.name == "stageline-save":
            thread.join(60)


@pytest.mark.parametrize(
    "stop_after",
    [pytest.param(1, marks=pytest.mark.slow), 3, pytest.param(5, marks=pytest.mark.slow), 8],
)
def test_resumed_run_is_bit_identical_to_an_uninterrupted_one(
    tmp_path: Path, stop_after: int
) -> None:
    wanted, _ = trained(None, 13)
    interrupt(tmp_path, 13, stop_after)
    found, _ = trained(tmp_path, 13, ranks=3)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_finished_run_is_not_trained_further(tmp_path: Path) -> None:
    wanted, _ = trained(tmp_path, 5)
    found, reports = trained(tmp_path, 5)
    assert reports == []
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_metrics_file_has_one_line_per_report_after_a_restart(tmp_path: Path) -> None:
    interrupt(tmp_path, 9, stop_after=5)  # saved at step 3, reported at 2 and 4
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 5, "lo')  # what a crash leaves
    _, reports = trained(tmp_path, 9)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4, 6, 8, 9]
    assert [report.step for report in reports] == [4, 6, 8, 9]
    last = lines[-1]
    assert last["loss"] == pytest.approx(reports[-1].loss)
    assert last["samples_per_second"] > 0
    assert last["tokens_per_second"] is None
    assert 0 <= last["bubble"] < 1
    assert len(last["busy"]) == 2
    assert all(0 < share <= 1 for share in last["busy"])
    assert last["peak_memory"][0] > 10**7


def test_tokens_per_second() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5))
    pipe = sl.Pipeline(model, loss, num_ranks=2, num_microbatches=2, backend="serial")
    data = [(torch.ones(4, 7, dtype=torch.int64), torch.ones(4, 7, dtype=torch.int64))]
    optimizer = torch.optim.SGD(pipe.parameters(), 0.1)
    (report,) = sl.fit(pipe, data, optimizer, steps=3)
    assert report.tokens_per_second == pytest.approx(7 * report.samples_per_second)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def test_tensorboard_has_the_reported_numbers(tmp_path: Path) -> None:
    _, reports = trained(tmp_path, 4, tensorboard=True)
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    shown = [(event.step, event.value) for event in board.Scalars("loss")]
    assert shown == [(r.step, pytest.approx(r.loss)) for r in reports]
    assert "busy/1" in board.Tags()["scalars"]


def test_one_line_per_tenth_of_the_steps_without_a_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    trained(None, 40)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == [str(4 * tenth) for tenth in range(1, 11)]
    assert all("samples/s" in line for line in lines)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (iter([(torch.ones(2, 4), torch.ones(2, 1))]), "the loader yielded no batch in epoch 1"),
        ([], "the loader yielded no batch in epoch 0"),
        ([torch.ones(2, 4)], r"the loader gave a Tensor, but a batch is a pair"),
    ],
)
def test_invalid_loaders_are_refused(data: Any, message: str) -> None:
    pipe = sl.Pipeline(
        nn.Sequential(nn.Linear(4, 1)),
        nn.functional.mse_loss,
        num_ranks=1,
        num_microbatches=1,
        backend="serial",
    )
    with pytest.raises(sl.BatchError, match=message):
        sl.fit(pipe, data, torch.optim.SGD(pipe.parameters(), 0.1), steps=3)


def test_checkpoint_not_saved_by_fit_is_refused(tmp_path: Path) -> None:
    pipe = sl.Pipeline(
        nn.Sequential(nn.Linear(4, 1)),
        nn.functional.mse_loss,
        num_ranks=1,
        num_microbatches=1,
        backend="serial",
    )
    optimizer = torch.optim.SGD(pipe.parameters(), 0.1)
    sl.save(tmp_path, pipe, optimizer, step=4)
    with pytest.raises(sl.CheckpointError, match=r"was not saved by sl\.fit"):
        sl.fit(pipe, [], optimizer, steps=5, folder=tmp_path)


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_streamed_run_resumes_bit_identically(schedule: str, tmp_path: Path) -> None:
    """Stopped after a checkpoint and begun anew, it has the bits of a run without a stop."""

    def trained(folder: Path, *steps: int) -> dict[str, Tensor]:
        for last in steps:
            torch.manual_seed(1)
            model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1))
            pipe = sl.Pipeline(
                model,
                nn.functional.mse_loss,
                num_ranks=2,
                num_microbatches=2,
                schedule=schedule,
                optimizer_fn=lambda weights: torch.optim.AdamW(weights, 0.01),
                scheduler_fn=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5),
                backend="serial",
            )
            reports = sl.fit(pipe, data, None, steps=last, folder=folder, save_every=5)
            assert reports[-1].step == last
            assert reports[-1].bubble is None
        return model.state_dict()

    torch.manual_seed(2)
    data = [(torch.randn(4, 4), torch.randn(4, 1)) for _ in range(7)]
    whole, stopped = trained(tmp_path / "whole", 12), trained(tmp_path / "stopped", 5, 12)
    assert all(torch.equal(whole[name], stopped[name]) for name in whole)


def test_optimizer_given_to_a_pipeline_with_its_own_is_refused() -> None:
    pipe = sl.Pipeline(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)),
        nn.functional.mse_loss,
        num_ranks=2,
        num_microbatches=2,
        optimizer_fn=lambda weights: torch.optim.SGD(weights, 0.1),
        backend="serial",
    )
    with pytest.raises(
        sl.ModelError, match="optimizer was given to fit, but the pipeline steps its"
    ):
        sl.fit(pipe, [], pipe.optimizers[0], steps=1)


def test_refused_checkpoint_changes_nothing(tmp_path: Path) -> None:
    trained(tmp_path, 6)
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.BatchNorm1d(8), nn.Linear(8, 1))
    pipe = sl.Pipeline(
        model, nn.functional.mse_loss, num_ranks=2, num_microbatches=2, backend="serial"
    )
    optimizer = AdamW(pipe.parameters(), 1e-2)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    with pytest.raises(sl.CheckpointError, match="saved with scheduler LambdaLR, but now it is"):
        sl.fit(pipe, Loader(), optimizer, steps=9, folder=tmp_path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert not optimizer.state
    assert pipe.num_steps == 0


class Scored(nn.Module):
    """Computes its own loss, as the models of transformers do, from what a batch names."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        for block in self.blocks:
            x = block(x).tanh()
        return {"loss": nn.functional.mse_loss(x, labels), "out": x}


def own_losses(as_item: Callable[[Tensor, Tensor], Any], stream: bool = False) -> list[float]:
    torch.manual_seed(0)
    model, x = Scored(), torch.arange(24.0).reshape(6, 4).sin()
    options: dict[str, Any] = {}
    if stream:
        options["optimizer_fn"] = lambda params: AdamW(params, 1e-2)
    with sl.Pipeline(
        model,
        example_inputs={"x": x, "labels": x},
        num_ranks=2,
        num_microbatches=2,
        backend="serial",
        **options,
    ) as pipe:
        optimizer = None if stream else AdamW(pipe.parameters(), 1e-2)
        data = [as_item(x, x.flip(0))]
        reports = sl.fit(pipe, data, optimizer, steps=4, report_every=2)
    return [report.loss for report in reports]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "as_item",
    [
        lambda x, y: {"x": x, "labels": y},
        lambda x, y: (x, y),
        lambda x, y: [x, y],
        lambda x, y: ({"x": x, "labels": y}, None),
    ],
    ids=["mapping", "tuple", "list", "pair"],
)
def test_a_loader_gives_whole_batches_to_a_model_with_its_own_loss(
    as_item: Callable[[Tensor, Tensor], Any], stream: bool
) -> None:
    losses = own_losses(as_item, stream)
    assert losses == own_losses(lambda x, y: {"x": x, "labels": y}, stream)
    assert losses[1] < losses[0]


def test_an_integer_for_each_sample_is_no_token() -> None:
    tokens = torch.zeros(8, 5, dtype=torch.int64)
    assert num_tokens({"noisy": torch.zeros(8, 3), "time": tokens[:, 0]}) is None
    assert num_tokens({"label": tokens[:, 0], "tokens": tokens}) == 40
