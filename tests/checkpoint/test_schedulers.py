"""The states of a pipeline's own schedulers are saved and loaded, or refused."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoint.pipelines import (
    assert_same,
    everything,
    pipeline,
)
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim import lr_scheduler as schedules
from torch.optim.lr_scheduler import LRScheduler

import stageline as sl
from stageline.checkpoint import record_file

Make = Callable[[Optimizer], LRScheduler]


SCHEDULERS: dict[str, Make] = {
    "multi step": lambda o: schedules.MultiStepLR(o, [2, 5, 5], 0.5),
    "in a row": lambda o: schedules.SequentialLR(
        o, [schedules.LinearLR(o, total_iters=2), schedules.MultiStepLR(o, [2, 4])], [2]
    ),
    "cycles": lambda o: schedules.CyclicLR(o, 0.01, 0.1, 2, cycle_momentum=False),
    "one cycle": lambda o: schedules.OneCycleLR(o, 0.1, total_steps=20),
}


def owned(make: Make, *, rate: float | Tensor = 0.1, num_ranks: int = 2) -> sl.Pipeline:
    def optimizer(weights: list[nn.Parameter]) -> Optimizer:
        return SGD(weights, rate.clone() if isinstance(rate, Tensor) else rate, momentum=0.9)

    return pipeline(num_ranks, optimizer_fn=optimizer, scheduler_fn=make)


def train_owned(pipe: sl.Pipeline, steps: range) -> None:
    for step in steps:
        x, y = torch.randint(0, 11, (2, 9, 5), generator=torch.Generator().manual_seed(step))
        pipe.step(x, y)


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
def test_resumed_schedulers_are_identical_to_uninterrupted_ones(
    tmp_path: Path, make: Make, rate: float | Tensor
) -> None:
    pipe = owned(make, rate=rate)
    train_owned(pipe, range(3))
    sl.save(tmp_path, pipe, step=3)
    train_owned(pipe, range(3, 8))
    again = owned(make, rate=rate, num_ranks=3)
    sl.load(tmp_path, again)
    train_owned(again, range(3, 8))
    for name, tensor in pipe.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    rates = [each.param_groups[0]["lr"] for each in (*pipe.optimizers, *again.optimizers)]
    assert len({float(rate) for rate in rates}) == 1


class Fussy(schedules.StepLR):
    """It refuses what it does not like after it has changed itself and the optimizer."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.optimizer.param_groups[0]["lr"] = 7.0
        if state_dict["gamma"] != 0.5:
            raise KeyError("gamma")


def test_other_scheduler_or_invalid_state_is_refused(tmp_path: Path) -> None:
    pipe = owned(lambda o: schedules.StepLR(o, 2))
    train_owned(pipe, range(2))
    sl.save(tmp_path / "step", pipe, step=2)
    fussy = owned(lambda o: Fussy(o, 2, gamma=0.5))
    train_owned(fussy, range(3))
    sl.save(tmp_path / "fussy", fussy, step=3)

    before = everything(fussy, None)
    with pytest.raises(sl.CheckpointError, match="was saved with StepLR, but the pipeline has Fus"):
        sl.load(tmp_path / "step", fussy)
    path = tmp_path / "fussy" / "step-00000003"
    fields = record_file.read_record(path)
    for wrong, message in (
        ({"gamma": 0.25}, "state that Fussy cannot load: KeyError: 'gamma'"),
        ({"gamma": None}, "has None for the scheduler's state, gamma, which is now 0.5"),
        ({"base_lrs": [0.1, 0.1]}, "for the scheduler's state, base_lrs"),
        ({"last_epoch": "x"}, "has 'x' for the scheduler's state, last_epoch"),
    ):
        changed = deepcopy(fields)
        changed["scheduler"]["state"] |= wrong
        (path / record_file.RECORD).write_bytes(record_file.record_text(changed))
        with pytest.raises(sl.CheckpointError, match=message):
            sl.load(path, fussy)
        assert_same(everything(fussy, None), before)
    fields["scheduler"] = None
    (path / record_file.RECORD).write_bytes(record_file.record_text(fields))
    with pytest.raises(sl.CheckpointError, match="saved without a scheduler, but the pipeline has"):
        sl.load(path, fussy)
    assert_same(everything(fussy, None), before)


def test_different_schedulers_on_two_stages_are_refused(tmp_path: Path) -> None:
    lengths = iter(range(2, 9))
    pipe = owned(lambda o: schedules.StepLR(o, next(lengths)))
    with pytest.raises(sl.CheckpointError, match=r"schedulers of two stages, .* different states"):
        sl.save(tmp_path, pipe, step=1)
