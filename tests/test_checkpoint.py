"""Saving and loading in one process: the bits of never having stopped, or a refusal in words."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import stageline as sl
from stageline.checkpoint import folder as folders
from stageline.checkpoint import read_tensors, record_file, write_tensors
from stageline.checkpoint.group import checkpoint_group
from stageline.zoo.gpt import Head, loss


def model(width: int = 8, blocks: int = 3) -> nn.Sequential:
    """Tied weights in the first and the last layer, dropout, and statistics with a counter."""
    embedding = nn.Embedding(11, width)
    middle = [
        nn.Sequential(nn.Linear(width, width), nn.Dropout(0.3), nn.LayerNorm(width))
        for _ in range(blocks)
    ]
    return nn.Sequential(embedding, *middle, nn.BatchNorm1d(5), Head(embedding))


def pipeline(num_ranks: int = 2, *, init: int = 0, **options: Any) -> sl.Pipeline:
    torch.manual_seed(init)
    options = {"backend": "serial", "num_microbatches": 4, "seed": init, **options}
    return sl.Pipeline(model(), loss, num_ranks=num_ranks, **options)


def train(pipe: sl.Pipeline, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randint(0, 11, (2, 9, 5), generator=generator)
        pipe.step(x, y)
        pipe.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()


def everything(pipe: sl.Pipeline, optimizer: Optimizer | None) -> dict[str, Tensor]:
    found = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
    found["random"] = torch.get_rng_state()
    found["counts"] = torch.tensor([pipe.num_steps, pipe.seed])
    for number, state in (optimizer.state_dict()["state"] if optimizer else {}).items():
        found |= {f"{number}.{k}": v.clone() for k, v in state.items() if isinstance(v, Tensor)}
    return found


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert [name for name in found if not torch.equal(found[name], wanted[name])] == []


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Layers are tiny; threads that wait for each other take most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    pipe = pipeline()
    optimizer = AdamW(pipe.parameters(), 1e-2)
    train(pipe, optimizer, range(2))
    sl.save(tmp_path, pipe, optimizer, step=2, data={"seen": 18})
    return tmp_path


Making = Callable[[sl.Pipeline], Optimizer]


def adamw(pipe: sl.Pipeline) -> Optimizer:
    weights = [p for p in pipe.parameters() if p.ndim > 1]
    others = [p for p in pipe.parameters() if p.ndim == 1]
    groups: list[dict[str, Any]] = [{"params": weights}, {"params": others, "weight_decay": 0.0}]
    return AdamW(groups, 1e-2)


def sgd(pipe: sl.Pipeline) -> Optimizer:
    return SGD(pipe.parameters(), lr=torch.tensor(0.1), momentum=0.9)


@pytest.mark.parametrize("making", [adamw, sgd])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("backend", ["serial", "threads"])
def test_five_more_steps_have_the_bits_of_never_having_stopped(
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


def test_an_optimizer_that_has_state_goes_back_to_what_was_saved(saved: Path) -> None:
    pipe = pipeline()
    optimizer = AdamW(pipe.parameters(), 1e-2)
    train(pipe, optimizer, range(2))
    wanted = everything(pipe, optimizer)
    train(pipe, optimizer, range(7, 9))
    sl.load(saved, pipe, optimizer)
    assert_same(everything(pipe, optimizer), wanted)


def test_a_checkpoint_from_before_the_first_step_leaves_no_state(tmp_path: Path) -> None:
    pipe = pipeline()
    optimizer = AdamW(pipe.parameters(), 1e-2)
    sl.save(tmp_path, pipe, optimizer, step=0)
    train(pipe, optimizer, range(2))
    assert sl.load(tmp_path, pipe, optimizer) == (0, None)
    assert not optimizer.state


def test_the_model_alone_can_be_loaded(saved: Path) -> None:
    pipe = pipeline(3, init=4)
    sl.load(saved, pipe)
    expected = pipeline()
    train(expected, AdamW(expected.parameters(), 1e-2), range(2))
    assert pipe.state_dict().keys() == expected.state_dict().keys()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(pipe.state_dict()[name], tensor)


def test_names_are_those_of_the_model_and_a_tied_weight_is_there_once(saved: Path) -> None:
    names = load_file(saved / "step-00000002" / "shard-00001.safetensors").keys()
    assert "model.0.weight" in names
    assert "model.5.weight" not in names
    assert "optimizer.1.0.bias.exp_avg" in names
    fields = json.loads((saved / "step-00000002" / "checkpoint.json").read_text())
    assert fields["groups"][0]["values"]["lr"] == 1e-2


def test_weights_in_any_layout_come_back_as_they_were(tmp_path: Path) -> None:
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


def test_the_newest_are_kept_and_what_a_crash_left_goes(tmp_path: Path) -> None:
    pipe = pipeline()
    (tmp_path / "step-00000007.partial").mkdir()
    (tmp_path / "step-00000007.partial" / "shard.safetensors").write_text("half")
    (tmp_path / "notes.txt").write_text("mine")
    assert sl.latest(tmp_path) is None
    for step in (1, 2, 3):
        sl.save(tmp_path, pipe, step=step)
    sl.save(tmp_path, pipe, step=3)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["notes.txt", "step-00000002", "step-00000003"]
    sl.save(tmp_path, pipe, step=4, keep=1)
    assert sl.latest(tmp_path) == tmp_path / "step-00000004"
    assert len(list(tmp_path.iterdir())) == 2
    sl.save(tmp_path, pipe, step=5, keep=9)
    assert len(list(tmp_path.iterdir())) == 3


def test_after_a_return_to_an_earlier_step_the_newest_is_the_one_saved_last(saved: Path) -> None:
    pipe = pipeline()
    sl.save(saved, pipe, step=9)
    sl.load(saved / "step-00000002", pipe)
    sl.save(saved, pipe, step=4)
    assert sorted(path.name for path in saved.iterdir()) == ["step-00000004", "step-00000009"]
    assert sl.load(saved, pipe).step == 4


def test_a_save_in_the_background_has_the_state_of_when_it_was_asked_for(
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


def test_a_second_save_waits_for_the_first(tmp_path: Path) -> None:
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
def test_a_full_disk_is_told_and_leaves_the_earlier_checkpoint(
    saved: Path, monkeypatch: pytest.MonkeyPatch, wait: bool
) -> None:
    pipe = pipeline()
    full_disk(monkeypatch)
    with pytest.raises(sl.CheckpointError, match=r"No space left on device.*free some space"):
        sl.save(saved, pipe, step=3, wait=wait).wait()
    assert [path.name for path in saved.iterdir()] == ["step-00000002"]
    assert sl.load(saved, pipe).step == 2


@pytest.mark.parametrize("step", ["_write_file", "_sync_folder", "_delete_checkpoint"])
def test_whatever_fails_at_the_end_the_folder_has_whole_checkpoints_only(
    saved: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    pipe = pipeline()
    monkeypatch.setattr(folders, step, fail)
    with pytest.raises(sl.CheckpointError, match="Input/output error"):
        sl.save(saved, pipe, step=3, keep=1)
    for path in saved.iterdir():
        assert sl.load(path, pipe).step == int(path.name[5:])


def test_a_failure_that_nobody_asked_for_is_told_by_the_next_save(
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


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(sl.CheckpointError, match="could not be written: NotADirectoryError"):
        sl.save(tmp_path / "file" / "run", pipeline(), step=1)


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
def test_what_is_no_whole_checkpoint_is_refused(
    saved: Path, harm: Callable[[Path], None], message: str
) -> None:
    harm(saved / "step-00000002")
    assert_refused(saved / "step-00000002", pipeline(init=3), AdamW, message)


def test_a_folder_with_damaged_checkpoints_only_is_not_taken_for_an_empty_one(saved: Path) -> None:
    record_cut_short(saved / "step-00000002")
    with pytest.raises(sl.CheckpointError, match="has no other checkpoint: restore it"):
        sl.latest(saved)
    assert_refused(saved, pipeline(), AdamW, "has no other checkpoint")


def test_a_damaged_checkpoint_is_passed_over_with_a_warning(saved: Path) -> None:
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
            "lacks 4.0.bias, 4.0.weight, .* and has the additional 4.bias, 4.num_batches_tracked, .*",
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
def test_a_model_that_does_not_fit_is_refused(
    saved: Path, changed: nn.Sequential, message: str
) -> None:
    pipe = sl.Pipeline(changed, loss, num_ranks=2, num_microbatches=4, backend="serial")
    assert_refused(saved, pipe, AdamW, message)


def test_an_optimizer_that_does_not_fit_is_refused(saved: Path, tmp_path: Path) -> None:
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


def test_what_cannot_be_saved_is_refused(tmp_path: Path) -> None:
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


def test_an_exported_file_loads_into_the_plain_model(tmp_path: Path) -> None:
    pipe = pipeline()
    train(pipe, AdamW(pipe.parameters(), 1e-2), range(2))
    path = tmp_path / "model.safetensors"
    sl.export(path, pipe)
    sl.export(path, pipe)  # in place of the one that is there
    plain = model()
    plain.load_state_dict(load_file(path))
    assert_state_equal(plain, pipe)
    assert [found.name for found in tmp_path.iterdir()] == ["model.safetensors"]


def test_files_of_several_ranks_are_joined_into_one(tmp_path: Path) -> None:
    pipe = pipeline()
    state = pipe.state_dict() | {"flag": torch.tensor(True), "none": torch.empty(0, 2)}
    (tmp_path / "parts").mkdir()
    names = list(state)
    files = []
    for number, part in enumerate((names[::3], names[1::3], names[2::3]), start=1):
        pieces = write_tensors.local_pieces({name: state[name] for name in part})
        path = tmp_path / "parts" / f"shard-{number:05d}.safetensors"
        files.append(write_tensors.ShardFile(**write_tensors.write_shard(path, pieces)))
    found = read_tensors.stored_tensors(tmp_path / "parts", files)
    read_tensors.join_shards(found, [names[::2], names[1::2]], tmp_path / "whole")
    assert_same(load_file(tmp_path / "whole"), state)


def test_an_export_that_fails_leaves_the_file_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    pipe, path = pipeline(), tmp_path / "model.safetensors"
    sl.export(path, pipe)
    before = path.read_bytes()
    monkeypatch.setattr("stageline.checkpoint.export.write_shard", full)
    with pytest.raises(sl.CheckpointError, match="No space left on device"):
        sl.export(path, pipe)
    assert path.read_bytes() == before
    assert [found.name for found in tmp_path.iterdir()] == ["model.safetensors"]


def assert_state_equal(plain: nn.Module, pipe: sl.Pipeline) -> None:
    assert plain.state_dict().keys() == pipe.state_dict().keys()
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, pipe.state_dict()[name])
