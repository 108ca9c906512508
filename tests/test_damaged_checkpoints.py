"""Damaged checkpoints: each loads exactly what was saved, or is refused and changes nothing.

benchmarks/damaged_checkpoints.py has many more kinds of damage, and 10,000 cases.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.test_checkpoint import pipeline, train
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim import lr_scheduler as schedules
from torch.optim.lr_scheduler import LRScheduler

import stageline as sl
from stageline.checkpoint import read_tensors, record_file

Everything = dict[str, Any]
RECORD = "checkpoint.json"


def everything(pipe: sl.Pipeline, optimizer: Optimizer | None) -> Everything:
    """Return copies of all that a load may change."""
    found: Everything = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
    found |= {"random": torch.get_rng_state(), "counts": [pipe.num_steps, pipe.seed]}
    for number, each in enumerate(pipe.optimizers if optimizer is None else (optimizer,)):
        state = deepcopy(each.state_dict())
        for index, group in enumerate(state["param_groups"]):
            found |= {f"{number} group {index} {key}": value for key, value in group.items()}
        for index, kept in state["state"].items():
            found |= {f"{number} state {index} {key}": value for key, value in kept.items()}
    for number, scheduler in enumerate(pipe.stepper.schedulers if pipe.stepper else ()):
        found[f"scheduler {number}"] = deepcopy(scheduler.state_dict())
    return found


def assert_same(found: Everything, wanted: Everything) -> None:
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        if isinstance(value, Tensor):
            assert torch.equal(value, wanted[name]), name
        else:
            assert value == wanted[name], name


class Saved:
    """A checkpoint, and a pipeline in another state that it is loaded into."""

    def __init__(self, folder: Path) -> None:
        pipe, optimizer = self.made()
        train(pipe, optimizer, range(2))
        sl.save(folder, pipe, optimizer, step=2, data={"seen": (18, None), 3: [1]})
        self.path = folder / "step-00000002"
        self.right = everything(pipe, optimizer)
        self.files = {path.name: path.read_bytes() for path in self.path.iterdir()}
        self.pipe, self.optimizer = self.made(init=5)
        train(self.pipe, self.optimizer, range(3))
        self.before = everything(self.pipe, self.optimizer)

    @staticmethod
    def made(init: int = 0) -> tuple[sl.Pipeline, Optimizer]:
        pipe = pipeline(init=init)
        return pipe, AdamW(pipe.parameters(), 1e-2)

    def put_back(self) -> None:
        shutil.rmtree(self.path)
        self.path.mkdir()
        for name, data in self.files.items():
            (self.path / name).write_bytes(data)

    def assert_refused(self, message: str | None = None) -> None:
        torch.set_rng_state(self.before["random"])
        with pytest.raises(sl.CheckpointError, match=message):
            sl.load(self.path, self.pipe, self.optimizer)
        assert_same(everything(self.pipe, self.optimizer), self.before)

    def record(self, change: Callable[[dict[str, Any]], Any]) -> None:
        """Change the record, and make its checksum fit."""
        fields = record_file.read_record(self.path)
        change(fields)
        (self.path / RECORD).write_bytes(record_file.record_text(fields))

    def header(self, change: Callable[[dict[str, Any], dict[str, Any]], Any]) -> None:
        """Change a header and what we add to it, and make its checksum fit."""
        path = self.path / "shard-00001.safetensors"
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        fields = json.loads(data[8 : 8 + length])
        own = json.loads(fields["__metadata__"]["stageline"])
        change(fields, own)
        fields["__metadata__"]["stageline"] = json.dumps(own)
        text = json.dumps(fields).encode()
        header = len(text).to_bytes(8, "little") + text
        path.write_bytes(header + data[8 + length :])
        seen = {"num_bytes": path.stat().st_size, "header_bytes": len(header)}
        seen["crc32"] = zlib.crc32(header)
        self.record(lambda record: record["files"][0].update(seen))


@pytest.fixture(scope="module")
def one_of_all(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    torch.set_num_threads(1)
    return Saved(tmp_path_factory.mktemp("saved"))


@pytest.fixture
def saved(one_of_all: Saved) -> Iterator[Saved]:
    yield one_of_all
    one_of_all.put_back()


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_a_flipped_bit_anywhere_is_seen(one_of_all: Saved, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(one_of_all.files)))
    damaged = bytearray(one_of_all.files[name])
    damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    (one_of_all.path / name).write_bytes(damaged)
    one_of_all.assert_refused()
    one_of_all.put_back()


def test_a_flipped_bit_in_each_of_its_tensors_is_seen(saved: Saved) -> None:
    name = "shard-00001.safetensors"
    length = 8 + int.from_bytes(saved.files[name][:8], "little")
    header = json.loads(saved.files[name][8:length])
    for tensor, fields in header.items():
        if tensor != "__metadata__":
            start, stop = fields["data_offsets"]
            damaged = bytearray(saved.files[name])
            damaged[length + (start + stop - 1) // 2] ^= 16
            (saved.path / name).write_bytes(damaged)
            saved.assert_refused("the checksum of bytes .* does not match")


def test_what_was_saved_is_loaded_to_the_last_bit(saved: Saved) -> None:
    pipe, optimizer = Saved.made(init=5)
    train(pipe, optimizer, range(3))
    assert sl.load(saved.path, pipe, optimizer) == (2, {"seen": (18, None), 3: [1]})
    assert_same(everything(pipe, optimizer), saved.right)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r["groups"][0].update(values=None), r"its field groups.0.values is invalid"),
        (lambda r: r["groups"][0]["values"].update(lr="x"), "has 'x' for the optimizer's lr"),
        (lambda r: r["groups"][0]["values"].update(lr=10**400), "has int 1000.*… for the opt"),
        (
            lambda r: r["groups"][0]["values"].update(fused=2),
            "has 2 for the optimizer's fused, .* True, False or None",
        ),
        (lambda r: r["groups"][0]["values"].update(lr=None), "has None for the optimizer's lr"),
        (lambda r: r["groups"][0]["values"].update(lr=float("nan")), "has nan for the optimizer's"),
        (lambda r: r["groups"][0]["values"].update(betas={"()": [0.9]}), "for the optimizer's bet"),
        (lambda r: r["groups"][0]["values"].update(betas={"()": [0.9, 7]}), "has 7 .* from 0.0 to"),
        (lambda r: r["groups"][0]["values"].update(amsgrad=0.5), "has 0.5 for .*amsgrad"),
        (lambda r: r["groups"][0].update(names=[]), "lacks 0.weight"),
        (lambda r: r["groups"].append(r["groups"][0]), "a parameter in several groups"),
        (lambda r: r.update(num_steps=None), "its field num_steps is invalid"),
        (lambda r: r.update(num_steps=True), "its field num_steps is invalid"),
        (lambda r: r.update(num_steps=-1), "its field num_steps is invalid"),
        (lambda r: r.update(seed=2**64), "its field seed is invalid"),
        (lambda r: r.update(step="2"), "its field step is invalid"),
        (lambda r: r.update(values={"0.weight": {"step": []}}), "its field values.0.weight.step"),
        (
            lambda r: r.update(values={"x": {"step": 1}}),
            "the state of a parameter that is in no group",
        ),
        (lambda r: r.update(data={"{}": [1]}), "is damaged"),
        (lambda r: r.update(extra=1), "its field extra is invalid"),
        (
            lambda r: r["files"][0].update(name="../x.safetensors"),
            "its field files.0.name is invalid",
        ),
        (lambda r: r["files"][0].update(header_bytes=2**40), "is damaged"),
        (lambda r: r["files"].append(r["files"][0]), "do not make up a tensor"),
        (lambda r: r["files"].clear(), "lacks 0.weight"),
    ],
)
def test_a_record_that_cannot_be_is_refused_though_its_checksum_fits(
    saved: Saved, change: Callable[[dict[str, Any]], Any], message: str
) -> None:
    saved.record(change)
    saved.assert_refused(message)


MOMENT = "optimizer.1.0.weight.exp_avg"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h, _: h[MOMENT].update(shape=[2**40]), "cannot be at bytes"),
        (lambda h, _: h[MOMENT].update(shape=[8, -8]), "header was not written by sl.save"),
        (lambda h, _: h[MOMENT].update(shape=[8, 8.0]), "header was not written by sl.save"),
        (lambda h, _: h[MOMENT].update(data_offsets=[0, 2**62]), "cannot be at bytes"),
        (lambda h, _: h[MOMENT].update(data_offsets=[4, 260]), "cannot be at bytes"),
        (lambda h, _: h[MOMENT].update(dtype="F64"), "cannot be at bytes"),
        (lambda h, _: h[MOMENT].update(dtype="x"), "unknown dtype 'x'"),
        (lambda h, _: h.pop(MOMENT), "not have a checksum for each tensor"),
        (lambda _, own: own.pop(MOMENT), "not have a checksum for each tensor"),
        (lambda _, own: own[MOMENT].update(whole=[2**40, 8]), "do not make up a tensor"),
        (lambda _, own: own[MOMENT].update(offset=[1, 0]), "cannot be at .1, 0. of"),
        (lambda _, own: own[MOMENT].update(offset=[0]), "cannot be at .0,. of"),
        (lambda _, own: own[MOMENT].update(crc32=7), "the checksum of bytes .* does not match"),
        (lambda h, _: h["random.cpu"].update(dtype="I8"), "has int8 .* for random.cpu"),
    ],
)
def test_a_header_that_cannot_be_is_refused_though_its_checksum_fits(
    saved: Saved, change: Callable[[dict[str, Any], dict[str, Any]], Any], message: str
) -> None:
    saved.header(change)
    saved.assert_refused(message)


def test_a_state_of_terabytes_takes_no_memory(saved: Saved) -> None:
    """The file is as long as that, but full of holes, and its checksums fit."""
    size = 2**40
    path = saved.path / "shard-00001.safetensors"

    def giant(header: dict[str, Any], own: dict[str, Any]) -> None:
        end = max(header[name]["data_offsets"][1] for name in own)
        name = "optimizer.1.0.weight.max_exp_avg_sq"
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [end, end + size]}
        own[name] = {"crc32": 0, "offset": [0], "whole": [size]}

    saved.header(giant)
    saved.assert_refused("its tensors end at byte")
    os.truncate(path, path.stat().st_size + size)
    saved.record(lambda record: record["files"][0].update(num_bytes=path.stat().st_size))
    saved.assert_refused(
        r"has uint8 \(1099511627776,\) for optimizer.1.0.weight.max_exp_avg_sq, but"
    )


def test_a_random_state_that_is_none_changes_nothing(saved: Saved) -> None:
    path = saved.path / "shard-00001.safetensors"
    data = bytearray(path.read_bytes())
    length = 8 + int.from_bytes(data[:8], "little")
    start, stop = json.loads(data[8:length])["random.cpu"]["data_offsets"]
    garbage = b"\xff" * (stop - start)
    data[length + start : length + stop] = garbage
    path.write_bytes(data)
    crc32 = zlib.crc32(garbage)
    saved.header(lambda _, own: own["random.cpu"].update(crc32=crc32))
    saved.assert_refused("random.cpu is not the state of a generator")


def test_the_first_format_is_refused_by_name(saved: Saved) -> None:
    (saved.path / RECORD).write_text('{\n "stageline_checkpoint": 1,\n "number": 1\n}')
    saved.assert_refused("it has format 1, but this version of Stageline reads format 2")
    text = saved.files[RECORD].replace(b'checkpoint": 2', b'checkpoint": 3')
    (saved.path / RECORD).write_bytes(text)
    saved.assert_refused("it has format 3, but")


@pytest.mark.parametrize("kind", ["folder", "pipe", "device", "loop", "nothing"])
@pytest.mark.parametrize("name", [RECORD, "shard-00001.safetensors"])
def test_what_is_no_file_is_refused(saved: Saved, name: str, kind: str) -> None:
    path = saved.path / name
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind != "nothing":
        path.symlink_to("/dev/zero" if kind == "device" else path.name)
    saved.assert_refused()


def test_a_link_to_a_whole_file_is_as_good(saved: Saved) -> None:
    path = saved.path / "shard-00001.safetensors"
    path.symlink_to(path.rename(saved.path / "elsewhere").name)
    pipe, optimizer = Saved.made(init=5)
    sl.load(saved.path, pipe, optimizer)
    assert_same(everything(pipe, optimizer), saved.right)


def failing(monkeypatch: pytest.MonkeyPatch, name: str, call: int) -> None:
    """Let a function of `read_tensors` fail the n-th time, as a disk does."""
    works, calls = getattr(read_tensors, name), iter(range(10**6))

    def read(stored: Any) -> Any:
        if next(calls) == call:
            raise OSError(5, "Input/output error")
        return works(stored)

    monkeypatch.setattr(read_tensors, name, read)


@pytest.mark.parametrize("held", [0, 1000, 2**28])
def test_a_disk_that_fails_while_checksums_are_compared_changes_nothing(
    saved: Saved, monkeypatch: pytest.MonkeyPatch, held: int
) -> None:
    monkeypatch.setattr(read_tensors, "MAX_CACHED", held)
    for call in (0, 1, 30, 71):
        with monkeypatch.context() as patch:
            failing(patch, "_read" if held == 2**28 else "_checksum", call if held != 1000 else 0)
            saved.assert_refused("Input/output error; nothing was changed")


@pytest.mark.parametrize("held", [0, 1000])
def test_what_is_too_large_to_be_kept_is_read_twice_with_the_same_bits(
    saved: Saved, monkeypatch: pytest.MonkeyPatch, held: int
) -> None:
    monkeypatch.setattr(read_tensors, "MAX_CACHED", held)
    pipe, optimizer = Saved.made(init=5)
    with monkeypatch.context() as patch:
        failing(patch, "_read", 20)
        with pytest.raises(sl.CheckpointError, match="some old and some new values: load again"):
            sl.load(saved.path, pipe, optimizer)
    sl.load(saved.path, pipe, optimizer)
    assert_same(everything(pipe, optimizer), saved.right)


def test_a_checkpoint_that_is_deleted_while_it_is_loaded_changes_nothing_or_all(
    saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `keep` of a training that goes on does to an evaluation."""
    for name, is_late in (("stored_tensors", False), ("TensorReader", False), ("_apply", True)):
        module = "stageline.checkpoint.load"
        with monkeypatch.context() as patch:
            works = getattr(sl.checkpoint.load, name)

            def vanish(*args: Any, works: Any = works) -> Any:
                shutil.rmtree(saved.path)
                return works(*args)

            patch.setattr(f"{module}.{name}", vanish)
            if is_late:
                sl.load(saved.path, *(made := Saved.made(init=5)))
                assert_same(everything(*made), saved.right)
            else:
                saved.assert_refused("No such file")
        saved.path.mkdir()
        saved.put_back()


Make = Callable[[Optimizer], LRScheduler]
SCHEDULERS: dict[str, Make] = {
    "milestones": lambda o: schedules.MultiStepLR(o, [2, 5, 5], 0.5),
    "in a row": lambda o: schedules.SequentialLR(
        o, [schedules.LinearLR(o, total_iters=2), schedules.MultiStepLR(o, [2, 4])], [2]
    ),
    "cycles": lambda o: schedules.CyclicLR(o, 0.01, 0.1, 2, cycle_momentum=False),
    "one cycle": lambda o: schedules.OneCycleLR(o, 0.1, total_steps=20),
}


def owned(make: Make, *, rate: float | Tensor = 0.1, num_ranks: int = 2) -> sl.Pipeline:
    def optimizer(weights: list[nn.Parameter]) -> Optimizer:
        return SGD(weights, rate.clone() if isinstance(rate, Tensor) else rate, momentum=0.9)

    return pipeline(num_ranks, optimizer=optimizer, scheduler=make)


def train_owned(pipe: sl.Pipeline, steps: range) -> None:
    for step in steps:
        x, y = torch.randint(0, 11, (2, 9, 5), generator=torch.Generator().manual_seed(step))
        pipe.step(x, y)


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
def test_schedulers_go_on_as_if_they_had_not_stopped(
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


def test_a_scheduler_that_is_another_or_raises_changes_nothing(tmp_path: Path) -> None:
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
        (path / RECORD).write_bytes(record_file.record_text(changed))
        with pytest.raises(sl.CheckpointError, match=message):
            sl.load(path, fussy)
        assert_same(everything(fussy, None), before)
    fields["scheduler"] = None
    (path / RECORD).write_bytes(record_file.record_text(fields))
    with pytest.raises(sl.CheckpointError, match="saved without a scheduler, but the pipeline has"):
        sl.load(path, fussy)
    assert_same(everything(fussy, None), before)


def test_schedulers_of_stages_that_differ_are_not_saved(tmp_path: Path) -> None:
    lengths = iter(range(2, 9))
    pipe = owned(lambda o: schedules.StepLR(o, next(lengths)))
    with pytest.raises(sl.CheckpointError, match=r"schedulers of two stages, .* different states"):
        sl.save(tmp_path, pipe, step=1)


def test_an_optimizer_in_one_kernel_gets_its_options_and_counts_back(tmp_path: Path) -> None:
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


def test_a_buffer_that_cannot_be_written_to_is_told_before_anything_is_changed(
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


def test_a_layer_whose_state_is_a_copy_is_told(tmp_path: Path) -> None:
    """What is loaded into the copy would be lost without a word."""
    mse = nn.functional.mse_loss
    layers = [nn.Linear(2, 2), Copying()]
    pipe = sl.Pipeline(layers, mse, num_ranks=1, num_microbatches=1, backend="serial")
    sl.save(tmp_path, pipe, step=1)
    before = everything(pipe, None)
    with pytest.raises(sl.CheckpointError, match=r"1.weight cannot be loaded into: .* a copy"):
        sl.load(tmp_path, pipe)
    assert_same(everything(pipe, None), before)


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
def test_data_comes_back_as_it_was(tmp_path: Path, data: Any) -> None:
    pipe = pipeline()
    sl.save(tmp_path, pipe, step=1, data=data)
    found = sl.load(tmp_path, pipe).data
    assert found == data
    assert type(found) is type(data)


def test_data_that_would_not_come_back_is_refused(tmp_path: Path) -> None:
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
