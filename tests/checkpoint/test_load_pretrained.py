"""sl.load_pretrained copies weights from files of other programs, or changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.checkpoint.pretrained_models import (
    EMBEDDING,
    TIED,
    assert_state,
    batch,
    build,
    layers,
    tensors,
    uninitialized,
    write_shards,
)
from torch import Tensor, nn
from torch.optim import AdamW

import stageline as sl
from stageline.checkpoint import read_tensors
from stageline.zoo.gpt import loss

State = dict[str, Tensor]


@pytest.fixture(scope="module")
def state() -> State:
    """The weights of a trained model, each once."""
    pipe = build(seed=5)
    optimizer = AdamW(pipe.parameters(), 0.1)
    pipe.step(*batch())
    optimizer.step()
    return {name: tensor for name, tensor in tensors(pipe).items() if name != TIED}


def with_tie(state: State) -> State:
    return state | {TIED: state[EMBEDDING]}


def renamed(state: State, change: Callable[[str], str]) -> State:
    return {change(name): tensor for name, tensor in state.items()}


def without_prefix(name: str) -> str:
    return name.removeprefix("model.")


@pytest.mark.parametrize("kind", ["model", "other", "file", "index", "index file", "list"])
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_files_load_into_models_on_the_meta_device(
    tmp_path: Path, state: State, kind: str, num_ranks: int
) -> None:
    path: Any = tmp_path
    if kind.startswith("index"):
        write_shards(tmp_path, state, 3, weights_of="somebody")
        path = tmp_path / "model.safetensors.index.json" if kind == "index file" else tmp_path
    elif kind == "list":
        path = [tmp_path / "a", str(tmp_path / "b")]
        names = list(state)
        for place, part in zip(path, (names[::2], names[1::2]), strict=True):
            save_file({name: state[name] for name in part}, place)
    else:
        name = "model.safetensors" if kind == "model" else "weights.safetensors"
        save_file(state, tmp_path / name)
        path = tmp_path / name if kind == "file" else tmp_path
    pipe = uninitialized(num_ranks)
    assert sl.load_pretrained(pipe, path) == ((), ())
    assert_state(pipe, with_tie(state))
    full = build(seed=5)
    full.load_state_dict(with_tie(state))
    assert float(pipe.step(*batch()).loss) == float(full.step(*batch()).loss)


def test_values_are_converted_as_copy_does(tmp_path: Path, state: State) -> None:
    halves = {n: t.bfloat16() if t.is_floating_point() else t.int() for n, t in state.items()}
    save_file(halves, tmp_path / "model.safetensors")
    pipe = build()
    sl.load_pretrained(pipe, tmp_path)
    assert_state(pipe, with_tie({n: t.to(state[n].dtype) for n, t in halves.items()}))
    low = sl.Pipeline(
        nn.Sequential(nn.Linear(8, 8)).bfloat16(), loss, num_ranks=1, num_microbatches=1
    )
    weights = {"0.weight": torch.randn(8, 8, dtype=torch.float64), "0.bias": torch.ones(8)}
    save_file(weights, tmp_path / "64.safetensors")
    sl.load_pretrained(low, tmp_path / "64.safetensors")
    assert_state(low, {name: tensor.bfloat16() for name, tensor in weights.items()})
    low.close()


@pytest.mark.parametrize("name", [EMBEDDING, TIED])
def test_a_tied_weight_may_have_any_of_its_names(tmp_path: Path, state: State, name: str) -> None:
    others = {n: t for n, t in state.items() if n != EMBEDDING}
    save_file(others | {name: state[EMBEDDING]}, tmp_path / "model.safetensors")
    for pipe in (uninitialized(3), build(3)):
        sl.load_pretrained(pipe, tmp_path)
        assert_state(pipe, with_tie(state))


def test_weights_in_the_same_memory_count_as_tied(tmp_path: Path) -> None:
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    second.weight = nn.Parameter(first.weight.detach())
    pipe = sl.Pipeline([first, second], loss, num_ranks=2, num_microbatches=1, backend="serial")
    save_file({"1.weight": torch.eye(4)}, tmp_path / "model.safetensors")
    sl.load_pretrained(pipe, tmp_path)
    assert_state(pipe, {"0.weight": torch.eye(4), "1.weight": torch.eye(4)})


def test_both_names_of_a_tied_weight_must_have_the_same_values(
    tmp_path: Path, state: State
) -> None:
    path = tmp_path / "model.safetensors"
    save_file(state | {TIED: state[EMBEDDING].clone()}, path)
    pipe = build()
    sl.load_pretrained(pipe, path)
    assert_state(pipe, with_tie(state))
    save_file(state | {TIED: state[EMBEDDING] + 1}, path)
    with pytest.raises(sl.CheckpointError, match=r"different values for model.embed.weight, head"):
        sl.load_pretrained(pipe, path)
    assert_state(pipe, with_tie(state))
    sl.load_pretrained(pipe, path, strict=False)
    assert_state(pipe, with_tie(state))


@pytest.mark.parametrize(
    "change",
    [
        without_prefix,
        lambda name: f"module.{name}",
        lambda name: f"base_model.model.{name}",
        lambda name: f"outer.{without_prefix(name)}",
    ],
)
def test_a_prefix_is_found(tmp_path: Path, state: State, change: Callable[[str], str]) -> None:
    save_file(renamed(state, change), tmp_path / "model.safetensors")
    pipe = build()
    if change("model.x") == "outer.x":  # neither to be added nor to be removed
        with pytest.raises(
            sl.CheckpointError, match=r"has outer.embed.weight, .* no single prefix"
        ):
            sl.load_pretrained(pipe, tmp_path)
        return
    sl.load_pretrained(pipe, tmp_path)
    assert_state(pipe, with_tie(state))


def test_a_head_in_the_files_does_not_hide_the_prefix(tmp_path: Path, state: State) -> None:
    base = sl.Pipeline(
        [sl.Layer(without_prefix(layer.name), layer.module) for layer in layers()[:-1]],
        loss,
        num_ranks=2,
        num_microbatches=1,
        backend="serial",
    )
    body = {name: tensor for name, tensor in state.items() if name.startswith("model.")}
    save_file(body | {"lm_head.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    before = tensors(base)
    with pytest.raises(sl.CheckpointError, match=r"has the additional lm_head.weight, but"):
        sl.load_pretrained(base, tmp_path)
    assert_state(base, before)
    assert sl.load_pretrained(base, tmp_path, strict=False) == ((), ("lm_head.weight",))
    assert_state(base, renamed(body, without_prefix))


def test_a_prefix_that_is_not_the_only_one_is_refused(tmp_path: Path) -> None:
    made = [sl.Layer(f"{side}.0", nn.Linear(2, 2)) for side in ("encoder", "decoder")]
    pipe = sl.Pipeline(made, loss, num_ranks=2, num_microbatches=1, backend="serial")
    save_file({"0.weight": torch.eye(2), "0.bias": torch.ones(2)}, tmp_path / "model.safetensors")
    for strict in (True, False):
        with pytest.raises(sl.CheckpointError, match="no single prefix makes up for that"):
            sl.load_pretrained(pipe, tmp_path, strict=strict)


def test_missing_and_additional_names(tmp_path: Path, state: State) -> None:
    missing = ("model.layers.0.bias", "model.layers.1.weight")
    changed = {name: tensor for name, tensor in state.items() if name not in missing}
    save_file(changed | {"extra": torch.ones(1)}, tmp_path / "model.safetensors")
    pipe = build()
    before = tensors(pipe)
    with pytest.raises(
        sl.CheckpointError,
        match=r"lacks model.layers.0.bias, model.layers.1.weight and has the additional extra, but",
    ):
        sl.load_pretrained(pipe, tmp_path)
    assert_state(pipe, before)
    assert sl.load_pretrained(pipe, tmp_path, strict=False) == (missing, ("extra",))
    assert_state(pipe, with_tie(state) | {name: before[name] for name in missing})
    blank = uninitialized()
    with pytest.raises(
        sl.CheckpointError, match=r"lacks model.layers.0.bias, .* was on the meta device and is not"
    ):
        sl.load_pretrained(blank, tmp_path, strict=False)
    filled = build(on_meta=True, init_fn=fill)
    assert sl.load_pretrained(filled, tmp_path, strict=False).missing == missing
    assert torch.equal(filled.state_dict()[missing[1]], torch.full((8, 8), 2.0))


def fill(layer: sl.Layer) -> None:
    for tensor in layer.module.state_dict().values():
        tensor.fill_(2)


def test_buffers_that_are_no_longer_persistent_are_ignored(tmp_path: Path, state: State) -> None:
    old = {"model.scaled.table": torch.zeros(8), "model.layers.1.scaled.table": torch.zeros(8)}
    save_file(renamed(state | old, without_prefix), tmp_path / "model.safetensors")
    pipe = uninitialized()
    sl.load_pretrained(pipe, tmp_path)
    assert_state(pipe, with_tie(state))
    tables = [each for each in pipe.layers.modules.buffers() if each.shape == (8,)]
    assert [torch.equal(each, torch.arange(8.0)) for each in tables] == [True]


def test_other_shapes_are_refused(tmp_path: Path, state: State) -> None:
    wrong = {"model.scaled.scale": torch.ones(1), "model.layers.0.bias": torch.ones(7)}
    save_file(state | wrong, tmp_path / "model.safetensors")
    pipe = build()
    before = tensors(pipe)
    for strict in (True, False):
        with pytest.raises(
            sl.CheckpointError,
            match=r"model.layers.0.bias is \(7,\) instead of \(8,\), model.scaled.scale is \(1,\)",
        ):
            sl.load_pretrained(pipe, tmp_path, strict=strict)
    assert_state(pipe, before)


def test_folders_of_the_hub_s_cache_are_links(tmp_path: Path, state: State) -> None:
    whole = write_shards(tmp_path / "whole", state, 2)
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0123abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(whole.iterdir())):
        path.rename(blobs / str(number))
        (snapshot / path.name).symlink_to(Path("..") / ".." / "blobs" / str(number))
    snapshot.chmod(0o555)
    pipe = build()
    sl.load_pretrained(pipe, snapshot)
    assert_state(pipe, with_tie(state))


def test_training_continues_with_the_optimizer_s_state(tmp_path: Path, state: State) -> None:
    save_file(state, tmp_path / "model.safetensors")

    def train(load: Callable[[sl.Pipeline], Any]) -> State:
        pipe = build(num_ranks=3)
        optimizer = AdamW(pipe.parameters(), 0.1)
        for step in range(4):
            if step == 2:
                load(pipe)
            pipe.step(*batch())
            optimizer.step()
            optimizer.zero_grad()
        return tensors(pipe)

    def twice(pipe: sl.Pipeline) -> None:
        for _ in range(2):
            sl.load_pretrained(pipe, tmp_path)

    wanted = train(lambda pipe: pipe.load_state_dict(with_tie(state)))
    found = train(twice)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_streams_must_have_ended(tmp_path: Path, state: State) -> None:
    save_file(state, tmp_path / "model.safetensors")
    pipe = build(optimizer_fn=lambda weights: AdamW(weights, 0.1))
    results = pipe.run([batch()] * 9)
    next(results)
    with pytest.raises(sl.CheckpointError, match=r"a stream of pipe.run is in progress"):
        sl.load_pretrained(pipe, tmp_path)
    results.close()
    sl.load_pretrained(pipe, tmp_path)
    assert_state(pipe, with_tie(state))


def test_paths_without_weights_are_refused(tmp_path: Path) -> None:
    pipe = build()
    (tmp_path / "empty").mkdir()
    for name in ("a.safetensors", "b.safetensors"):
        (tmp_path / name).touch()
    sl.save(tmp_path / "run", pipe, step=1)
    wrong: list[tuple[Any, str]] = [
        (tmp_path / "nowhere", "does not exist: give a folder"),
        ("org/model", "huggingface_hub.snapshot_download"),
        (tmp_path / "empty", "has no .safetensors file"),
        (tmp_path, "has 2 files such as 'a.safetensors'"),
        (tmp_path / "run" / "step-00000001", "is a checkpoint of sl.save: load it with sl.load"),
        ([], "the list of files is empty"),
        ([tmp_path], "is not a regular file"),
        (None, "has to be text or a Path"),
        ("x" * 300, "cannot be loaded"),
        ("a\0b", "has to name a file"),
    ]
    for path, message in wrong:
        with pytest.raises(sl.CheckpointError, match=message):
            sl.load_pretrained(pipe, path)
    with pytest.raises(sl.CheckpointError, match="strict is 1, but has to be a bool"):
        sl.load_pretrained(pipe, tmp_path, strict=1)  # type: ignore[arg-type]


def test_disk_error_changes_nothing(
    tmp_path: Path, state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    save_file(state, tmp_path / "model.safetensors")
    pipe = build()
    before = tensors(pipe)
    monkeypatch.setattr(read_tensors, "_read", fail)
    with pytest.raises(sl.CheckpointError, match="Input/output error; nothing was changed"):
        sl.load_pretrained(pipe, tmp_path)
    assert_state(pipe, before)
    monkeypatch.setattr(read_tensors, "MAX_CACHED", 0)
    with pytest.raises(sl.CheckpointError, match="was checked, but then could not be read"):
        sl.load_pretrained(pipe, tmp_path)
