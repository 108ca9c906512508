"""Training resumed from a checkpoint has the bits of training that was never interrupted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.checkpoint.pipelines import (
    adamw,
    assert_same,
    everything,
    pipeline,
    sgd,
    train,
)
from torch import nn
from torch.optim import AdamW, Optimizer

import stageline as sl
from stageline.checkpoint import folder as folders
from stageline.checkpoint.group import checkpoint_group
from stageline.zoo.gpt import loss

Making = Callable[[sl.Pipeline], Optimizer]


@pytest.mark.parametrize("making", [adamw, sgd])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("backend", ["serial", "threads"])
def test_resumed_training_is_bit_identical_to_uninterrupted_training(
    tmp_path: Path, num_ranks: int, backend: str, making: Making
) -> None:
    pipe = pipeline(4)
    optimizer = making(pipe)
    train(pipe, optimizer, range(3))
    optimizer.param_groups[0]["lr"] *= 0.5  # as a scheduler does
    sl.save(tmp_path, pipe, optimizer, step=3, data={"seen": [27]})
    train(pipe, optimizer, range(3, 8))
    wanted = everything(pipe, optimizer)

    again = pipeline(num_ranks, init=5, backend=backend)
    other = making(again)
    assert sl.load(tmp_path, again, other) == (3, {"seen": [27]})
    train(again, other, range(3, 8))
    assert_same(everything(again, other), wanted)
    again.close()
    for group, before in zip(other.param_groups, optimizer.param_groups, strict=True):
        assert type(group.get("betas")) is type(before.get("betas"))
        assert group["lr"] == before["lr"]


def test_load_replaces_existing_optimizer_state(saved: Path) -> None:
    pipe = pipeline()
    optimizer = AdamW(pipe.parameters(), 1e-2)
    train(pipe, optimizer, range(2))
    wanted = everything(pipe, optimizer)
    train(pipe, optimizer, range(7, 9))
    sl.load(saved, pipe, optimizer)
    assert_same(everything(pipe, optimizer), wanted)


def test_load_of_step_0_removes_optimizer_state(tmp_path: Path) -> None:
    pipe = pipeline()
    optimizer = AdamW(pipe.parameters(), 1e-2)
    sl.save(tmp_path, pipe, optimizer, step=0)
    train(pipe, optimizer, range(2))
    assert sl.load(tmp_path, pipe, optimizer) == (0, None)
    assert not optimizer.state


def test_load_without_an_optimizer(saved: Path) -> None:
    pipe = pipeline(3, init=4)
    sl.load(saved, pipe)
    expected = pipeline()
    train(expected, AdamW(expected.parameters(), 1e-2), range(2))
    assert pipe.state_dict().keys() == expected.state_dict().keys()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(pipe.state_dict()[name], tensor)


def test_tensors_have_the_names_of_the_model_and_tied_weights_are_stored_once(saved: Path) -> None:
    names = load_file(saved / "step-00000002" / "shard-00001.safetensors").keys()
    assert "model.0.weight" in names
    assert "model.5.weight" not in names
    assert "optimizer.1.0.bias.exp_avg" in names
    fields = json.loads((saved / "step-00000002" / "checkpoint.json").read_text())
    assert fields["groups"][0]["values"]["lr"] == 1e-2


def test_memory_layouts_and_dtypes_are_preserved(tmp_path: Path) -> None:
    def made() -> sl.Pipeline:
        layers = [nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4, 2, bias=False)]
        net = nn.Sequential(*layers).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        net[3].weight = nn.Parameter(torch.randn(4, 2).t().to(torch.bfloat16))
        net[2].register_buffer("nothing", torch.empty(0, 3))
        net[2].register_buffer("flag", torch.tensor(True))
        return sl.Pipeline(net, loss, num_ranks=2, num_microbatches=1, backend="serial")

    pipe, again = made(), made()
    sl.save(tmp_path, pipe, step=1)
    sl.export(tmp_path / "model.safetensors", pipe)
    sl.load(tmp_path, again)
    for name, tensor in pipe.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)
        assert again.state_dict()[name].stride() == tensor.stride()
    again.model.load_state_dict(load_file(tmp_path / "model.safetensors"))


def test_capturable_optimizer_with_a_tensor_learning_rate(tmp_path: Path) -> None:
    """With a rate that is a tensor, which has to stay the same tensor: graphs hold on to it."""

    def made() -> tuple[sl.Pipeline, Optimizer]:
        pipe = pipeline()
        return pipe, AdamW(pipe.parameters(), torch.tensor(0.01), amsgrad=True)

    pipe, optimizer = made()
    train(pipe, optimizer, range(2))
    optimizer.param_groups[0]["capturable"] = True  # it steps on a GPU only, but can be saved here
    optimizer.param_groups[0]["lr"].fill_(0.005)
    sl.save(tmp_path, pipe, optimizer, step=2)
    again, other = made()
    rate = other.param_groups[0]["lr"]
    sl.load(tmp_path, again, other)
    assert_same(everything(again, other), everything(pipe, optimizer))
    assert other.param_groups[0]["lr"] is rate
    assert other.param_groups[0]["capturable"] is True


def test_background_save_has_the_state_at_the_time_of_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = pipeline()
    optimizer = AdamW(pipe.parameters(), 1e-2)
    train(pipe, optimizer, range(2))
    wanted = everything(pipe, optimizer)
    go, begin = Event(), folders.create_partial
    monkeypatch.setattr(folders, "create_partial", lambda *args: go.wait(60) and begin(*args))
    saving = sl.save(tmp_path, pipe, optimizer, step=2, wait=False)
    train(pipe, optimizer, range(2, 4))
    assert sl.latest(tmp_path) is None
    go.set()
    assert saving.wait() == tmp_path / "step-00000002"
    sl.load(tmp_path, pipe, optimizer)
    assert_same(everything(pipe, optimizer), wanted)


def test_second_save_waits_for_the_first(tmp_path: Path) -> None:
    pipe = pipeline()
    savings = [sl.save(tmp_path, pipe, step=step, wait=False) for step in (1, 2, 3)]
    assert savings[0].result.done()
    assert savings[1].result.done()
    assert savings[2].wait() == tmp_path / "step-00000003"
    assert len(list(tmp_path.iterdir())) == 2


def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A little can be written, then there is no room."""

    def write(path: Path, *_: Any) -> None:
        path.write_bytes(b"x" * 100)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("stageline.checkpoint.save.write_shard", write)


@pytest.mark.parametrize("wait", [True, False])
def test_full_disk_raises_and_keeps_the_earlier_checkpoint(
    saved: Path, monkeypatch: pytest.MonkeyPatch, wait: bool
) -> None:
    pipe = pipeline()
    full_disk(monkeypatch)
    with pytest.raises(sl.CheckpointError, match=r"No space left on device.*free some space"):
        sl.save(saved, pipe, step=3, wait=wait).wait()
    assert [path.name for path in saved.iterdir()] == ["step-00000002"]
    assert sl.load(saved, pipe).step == 2


def test_error_of_a_background_save_is_raised_by_the_next_save(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = pipeline()
    with monkeypatch.context() as patch:
        full_disk(patch)
        sl.save(saved, pipe, step=3, wait=False)
        saving = checkpoint_group(pipe).pending
        assert saving is not None
        assert isinstance(saving.result.exception(), sl.CheckpointError)
    with pytest.raises(sl.CheckpointError, match="No space left"):
        sl.save(saved, pipe, step=4)
    sl.save(saved, pipe, step=4)
    assert sl.latest(saved) == saved / "step-00000004"


def test_folder_that_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(sl.CheckpointError, match="could not be written: NotADirectoryError"):
        sl.save(tmp_path / "file" / "run", pipeline(), step=1)


@pytest.mark.parametrize(
    "data",
    [
        {"a": (1, [2, (3,)]), 4: {5.5: None, True: "x"}, "()": 1},
        {"()": [1]},
        {"{}": []},
        [float("inf"), -0.0, 10**300, "\ud800\0"],
        (),
        {},
    ],
)
def test_data_is_loaded_with_its_types(tmp_path: Path, data: Any) -> None:
    pipe = pipeline()
    sl.save(tmp_path, pipe, step=1, data=data)
    found = sl.load(tmp_path, pipe).data
    assert found == data
    assert type(found) is type(data)


def test_data_that_json_cannot_represent_is_refused(tmp_path: Path) -> None:
    pipe = pipeline()
    circle: list[Any] = []
    circle.append(circle)
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    for data in (circle, deep, 10**5000, {(1, torch.ones(1)): 2}, {1, 2}, b"x", object()):
        with pytest.raises(sl.CheckpointError, match="data cannot be saved"):
            sl.save(tmp_path, pipe, step=1, data=data)
    assert not list(tmp_path.iterdir())
