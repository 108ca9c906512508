"""Mistakes of new users: each error says what was seen, what was expected and what to do."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD

import stageline as sl
from stageline.errors import StagelineError

X, Y = torch.ones(8, 4), torch.zeros(8, 1)


def made(model: Any = None, loss_fn: Any = mse_loss, **options: Any) -> sl.Pipeline:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)) if model is None else model
    sizes: dict[str, Any] = {"num_ranks": 2, "num_microbatches": 2, "backend": "serial"}
    return sl.Pipeline(model, loss_fn, **(sizes | options))


def frozen() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).requires_grad_(False)


def fitted(optimizer: Any = None, folder: Any = None) -> None:
    pipe = made()
    sl.fit(pipe, [(X, Y)], optimizer or SGD(pipe.parameters(), 0.1), steps=1, folder=folder)


def detached(output: Tensor, target: Tensor) -> Tensor:
    return mse_loss(output, target).detach()


def number(output: Tensor, target: Tensor) -> float:
    return float(mse_loss(output, target).detach())


MISTAKES: dict[str, tuple[Callable[[], object], str]] = {
    "no target": (
        lambda: made().step(X),
        "the target is None, and loss_fn raised AttributeError: .*: give inputs and target as two",
    ),
    "a frozen model": (
        lambda: made(frozen()).step(X, Y),
        "the loss does not require a gradient, so .*: check that some parameters have requires",
    ),
    "a detached loss": (lambda: made(loss_fn=detached).step(X, Y), "neither the model nor loss_fn"),
    "a loss as a number": (
        lambda: made(loss_fn=number).step(X, Y),
        r"the loss is \d.* of type float, but has to be a tensor .*: return the tensor itself",
    ),
    "a loss without a value": (
        lambda: made(loss_fn=lambda *_: None).step(X, Y),
        "the loss is None of type NoneType, but has to be a tensor with one number",
    ),
    "the class of a loss": (
        lambda: made(loss_fn=nn.MSELoss),
        r"loss_fn is the class MSELoss, but .*: give an object of it, MSELoss\(\)",
    ),
    "no loss": (
        lambda: made(loss_fn=None),
        r"loss_fn is None, but has to be a function, .*: give loss_fn\(output, target\)",
    ),
    "the class of a model": (
        lambda: made(nn.Linear),
        "the model is the class Linear: give an object of it",
    ),
    "model and loss swapped": (
        lambda: made(mse_loss, nn.Linear(4, 1)),
        "the model is <function mse_loss.*, but has to be an nn.Module or a list of layers: the f",
    ),
    "an array": (
        lambda: made().step(X.numpy(), Y),
        r"the batch has a ndarray at \['x'\], but tensors or arrays .*: convert it with torch.as_t",
    ),
    "no number of micro-batches": (
        lambda: made(num_microbatches=None),
        "num_microbatches is missing, but a pipeline needs .*: give both, or a plan= that has them",
    ),
    "an unknown device": (
        lambda: made(devices=["gpu", "gpu"]),
        r"devices is \['gpu', 'gpu'\], but torch does not know them all: give names such as 'cpu'",
    ),
    "an unlike name of a schedule": (
        lambda: made(schedule="one_f_one_b"),
        "schedule 'one_f_one_b' is not known: use one of naive, gpipe, 1f1b",
    ),
    "the class of an optimizer": (
        lambda: fitted(SGD),
        r"the optimizer is <class .*SGD'>, but has to be an object .*: make one from pipe.param",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_answered_by_what_to_do(mistake: str) -> None:
    act, text = MISTAKES[mistake]
    with pytest.raises(StagelineError, match=text):
        act()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="its devices could be used")
def test_a_device_that_torch_was_built_without_is_named() -> None:
    with pytest.raises(StagelineError, match=r"device 'cuda:0' cannot be used: .*omit devices="):
        made(devices=["cuda:0", "cuda:1"])


def test_a_folder_that_is_a_file_is_named_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "file"
    torch.save(made().state_dict(), path)
    said = re.escape(str(path))
    with pytest.raises(StagelineError, match=f"'{said}' could not be written: .*to another place"):
        fitted(folder=path)
    with pytest.raises(StagelineError, match=f"'{said}' is a file, .*pipe.load_state_dict"):
        sl.load(path, made())


def test_a_loss_function_may_take_no_target() -> None:
    pipe = made(loss_fn=lambda output, _: output.mean())
    assert pipe.step(X).loss.isfinite()


def test_processes_of_a_launcher_without_a_process_group_get_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.warns(UserWarning, match=r"^2 processes were started, but there is no process gr"):
        made(backend=None).close()
    made(backend="threads").close()  # whoever names it means it


def test_a_single_process_of_a_launcher_gets_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    made(backend=None).close()
