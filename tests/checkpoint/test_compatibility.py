"""A checkpoint that does not match the pipeline is refused, and nothing is changed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.checkpoint.pipelines import (
    adamw,
    assert_same,
    everything,
    model,
    pipeline,
)
from torch import nn
from torch.optim import SGD, AdamW

import stageline as sl
from stageline.checkpoint import record_file
from stageline.zoo.gpt import loss


def cut_short(path: Path) -> None:
    file = next(path.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-100])


def cut_in_the_header(path: Path) -> None:
    file = next(path.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:5])


def foreign(path: Path) -> None:
    next(path.glob("*.safetensors")).write_bytes(b"PK\x03\x04 a zip file")


def of_another_program(path: Path) -> None:
    save_file({"model.0.weight": torch.ones(2)}, next(path.glob("*.safetensors")))


def without_its_tensors(path: Path) -> None:
    next(path.glob("*.safetensors")).unlink()


def record_without_a_seed(path: Path) -> None:
    fields = record_file.read_record(path)
    del fields["seed"]
    (path / "checkpoint.json").write_bytes(record_file.record_text(fields))


def record_of_another(path: Path) -> None:
    (path / "checkpoint.json").write_text("{}")


def record_cut_short(path: Path) -> None:
    text = (path / "checkpoint.json").read_bytes()
    (path / "checkpoint.json").write_bytes(text[:-9])


def nothing_there(path: Path) -> None:
    shutil.rmtree(path)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (cut_short, "shard-00001.safetensors' is damaged: it has .* bytes instead of"),
        (cut_in_the_header, "is damaged: it has 5 bytes instead of"),
        (foreign, "is damaged: it has .* bytes instead of"),
        (of_another_program, "is damaged: it has .* bytes instead of"),
        (without_its_tensors, "is damaged: .*No such file"),
        (
            record_without_a_seed,
            "checkpoint.json' is damaged: its field seed is invalid: field required",
        ),
        (record_of_another, "checkpoint.json' cannot be read: it is damaged or was not written"),
        (record_cut_short, "checkpoint.json' cannot be read: it is damaged: .* instead of"),
        (nothing_there, "has no checkpoint to load"),
    ],
)
def test_incomplete_checkpoints_are_refused(
    saved: Path, harm: Callable[[Path], None], message: str
) -> None:
    harm(saved / "step-00000002")
    assert_refused(saved / "step-00000002", pipeline(init=3), AdamW, message)


def test_folder_with_only_damaged_checkpoints_is_not_empty(saved: Path) -> None:
    record_cut_short(saved / "step-00000002")
    with pytest.raises(sl.CheckpointError, match="has no other checkpoint: restore it"):
        sl.latest(saved)
    assert_refused(saved, pipeline(), AdamW, "has no other checkpoint")


def test_damaged_checkpoint_is_skipped_with_a_warning(saved: Path) -> None:
    pipe = pipeline()
    sl.save(saved, pipe, step=3)
    record_cut_short(saved / "step-00000003")
    with pytest.warns(UserWarning, match="skipped step-00000003, using step-00000002"):
        assert sl.load(saved, pipe).step == 2
    sl.save(saved, pipe, step=4, keep=1)
    names = sorted(path.name for path in saved.iterdir())
    assert names == ["step-00000003", "step-00000004"]  # what may be looked into is not deleted


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            model(blocks=4),
            "lacks 4.0.bias, 4.0.weight, .* and has the additional 4.bias, 4.num_batches_tracked",
        ),
        (
            model(blocks=2),
            "lacks 3.bias, .* and 3 more and has the additional 3.0.bias, .* and 7 more, but",
        ),
        (model(width=6), r"0.weight is float32 \(11, 8\) instead of float32 \(11, 6\).* more: "),
        (model().double(), r"0.weight is float32 \(11, 8\) instead of float64 \(11, 8\)"),
    ],
    ids=["more layers", "fewer layers", "other shapes", "other type"],
)
def test_checkpoint_of_another_model_is_refused(
    saved: Path, changed: nn.Sequential, message: str
) -> None:
    pipe = sl.Pipeline(changed, loss, num_ranks=2, num_microbatches=4, backend="serial")
    assert_refused(saved, pipe, AdamW, message)


def test_checkpoint_of_another_optimizer_is_refused(saved: Path, tmp_path: Path) -> None:
    pipe = pipeline(init=3)
    assert_refused(saved, pipe, SGD, "was saved with AdamW, but the optimizer is SGD: use AdamW")
    some = list(pipe.parameters())[2:]
    assert_refused(
        saved,
        pipe,
        lambda *_: AdamW(some),
        "has the additional 0.weight, 1.0.weight, but the optimizer's",
    )
    sl.save(tmp_path / "alone", pipe, step=1)
    assert_refused(tmp_path / "alone", pipe, AdamW, "lacks 0.weight.*or load without an optimizer")
    sl.save(tmp_path / "groups", pipe, adamw(pipe), step=1)
    assert_refused(
        tmp_path / "groups", pipe, AdamW, "group 0 has 0.weight and 1.0.bias, but they were saved"
    )


def assert_refused(path: Path, pipe: sl.Pipeline, kind: Any, message: str) -> None:
    """And nothing is changed."""
    optimizer = kind(pipe.parameters())
    before, options = everything(pipe, optimizer), [*optimizer.param_groups[0].items()]
    with pytest.raises(sl.CheckpointError, match=message):
        sl.load(path, pipe, optimizer)
    assert_same(everything(pipe, optimizer), before)
    assert not optimizer.state
    assert [*optimizer.param_groups[0].items()] == options


class Odd(nn.Linear):
    def get_extra_state(self) -> object:
        return {"a": 1}


def test_state_that_cannot_be_saved_is_refused(tmp_path: Path) -> None:
    pipe = pipeline()
    with pytest.raises(sl.CheckpointError, match=r"data cannot be saved: .*Tensor"):
        sl.save(tmp_path, pipe, step=1, data=torch.ones(1))
    with pytest.raises(sl.CheckpointError, match="step is -1, but must be"):
        sl.save(tmp_path, pipe, step=-1)
    with pytest.raises(sl.CheckpointError, match="make the optimizer from pipe"):
        sl.save(tmp_path, pipe, AdamW(model().parameters()), step=1)
    optimizer = AdamW(pipe.parameters())
    optimizer.state[next(pipe.parameters())]["history"] = []
    with pytest.raises(sl.CheckpointError, match="the optimizer keeps 'history', a list"):
        sl.save(tmp_path, pipe, optimizer, step=1)
    odd = sl.Pipeline([Odd(2, 2)], loss, num_ranks=1, num_microbatches=1, backend="serial")
    with pytest.raises(sl.CheckpointError, match="layer '0' has '_extra_state' in its state"):
        sl.save(tmp_path, odd, step=1)
    assert not list(tmp_path.iterdir())


def test_expanded_buffer_is_refused_before_anything_is_changed(
    tmp_path: Path,
) -> None:
    def made() -> sl.Pipeline:
        layer = nn.Linear(2, 2)
        layer.register_buffer("mask", torch.zeros(1).expand(3))
        return sl.Pipeline(
            [nn.Linear(2, 2), layer],
            nn.functional.mse_loss,
            num_ranks=1,
            num_microbatches=1,
            backend="serial",
        )

    sl.save(tmp_path, made(), step=1)
    pipe = made()
    before = everything(pipe, None)
    with pytest.raises(sl.CheckpointError, match=r"model.1.mask cannot be loaded into.*clone"):
        sl.load(tmp_path, pipe)
    assert_same(everything(pipe, None), before)


class Copying(nn.Linear):
    """Its state is a copy, in another type, as of weights that are kept in less precision."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        hook: Any = self.register_state_dict_post_hook  # it has no types
        hook(self.convert)

    @staticmethod
    def convert(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
        state[f"{prefix}weight"] = state[f"{prefix}weight"].to(torch.bfloat16)


def test_layer_whose_state_dict_is_a_copy_is_refused(tmp_path: Path) -> None:
    """What is loaded into the copy would be lost without a word."""
    mse = nn.functional.mse_loss
    layers = [nn.Linear(2, 2), Copying()]
    pipe = sl.Pipeline(layers, mse, num_ranks=1, num_microbatches=1, backend="serial")
    sl.save(tmp_path, pipe, step=1)
    before = everything(pipe, None)
    with pytest.raises(sl.CheckpointError, match=r"1.weight cannot be loaded into: .* a copy"):
        sl.load(tmp_path, pipe)
    assert_same(everything(pipe, None), before)
