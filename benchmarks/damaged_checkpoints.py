"""Damaged checkpoints: each loads exactly what was saved, or is refused with nothing changed.

python benchmarks/damaged_checkpoints.py                       10,000 of them, some minutes
python benchmarks/damaged_checkpoints.py --cases 500 --seed 7
python benchmarks/damaged_checkpoints.py --seed 7 --only 123   one again, with its message

"Forged" ones have checksums that were made to fit the damage, as no accident does. They may load
what they say; all else holds for them too.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import sys
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import MultiStepLR

import stageline as sl
from stageline.checkpoint import folder as folders
from stageline.checkpoint import storage
from stageline.zoo.gpt import Head, loss

SECONDS, BYTES = 5.0, 2**30  # that no damaged checkpoint may take
DATA = {"seen": 18, "order": [3, 1, 2], "epoch": (4, None), 7: "x"}
Everything = dict[str, Any]
Damage = Callable[[random.Random, Path], None]


@dataclass
class Subject:
    """A pipeline with its optimizer, checkpoints of it, and what is right after loading them."""

    name: str
    pipe: sl.Pipeline
    optimizer: Optimizer | None
    folder: Path  # two checkpoints, steps 1 and 2
    other: Path  # a checkpoint of the state that it is in before each case
    right: dict[int, Everything]  # by step
    before: Everything


def model() -> nn.Sequential:
    """Return one with tied weights, dropout, statistics with a counter, and several types."""
    embedding = nn.Embedding(11, 8)
    block = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.LayerNorm(8))
    block.register_buffer("flags", torch.tensor([True, False]))
    block.register_buffer("coarse", torch.ones(3, 2, dtype=torch.bfloat16))
    block.register_buffer("nothing", torch.empty(0, 2))
    return nn.Sequential(embedding, block, nn.BatchNorm1d(5), Head(embedding))


def made(name: str) -> tuple[sl.Pipeline, Optimizer | None]:
    options: dict[str, Any] = {}
    if name == "owned":
        options["optimizer"] = lambda weights: AdamW(weights, 1e-2)
        options["scheduler"] = lambda optimizer: MultiStepLR(optimizer, [2, 5], 0.5)
    pipe = sl.Pipeline(
        model(), loss, num_ranks=2, num_microbatches=2, backend="serial", seed=3, **options
    )
    if name == "adamw":
        few = [p for p in pipe.parameters() if p.ndim == 1]
        rest = [p for p in pipe.parameters() if p.ndim > 1]
        groups: list[dict[str, Any]] = [{"params": rest}, {"params": few, "weight_decay": 0.0}]
        return pipe, AdamW(groups, 1e-2)
    if name == "sgd":
        return pipe, SGD(pipe.parameters(), lr=torch.tensor(0.1), momentum=0.9)
    return pipe, None


def train(pipe: sl.Pipeline, optimizer: Optimizer | None, seed: int) -> None:
    x, y = torch.randint(0, 11, (2, 4, 5), generator=torch.Generator().manual_seed(seed))
    pipe.step(x, y)
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()


def everything(pipe: sl.Pipeline, optimizer: Optimizer | None) -> Everything:
    """Return copies of all that a load may change."""
    found: Everything = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
    found["random"] = torch.get_rng_state()
    found["counts"] = [pipe.num_steps, pipe.seed]
    for number, each in enumerate(pipe.optimizers if optimizer is None else (optimizer,)):
        state = deepcopy(each.state_dict())
        for index, group in enumerate(state["param_groups"]):
            found |= {f"{number} group {index} {key}": value for key, value in group.items()}
        for index, kept in state["state"].items():
            found |= {f"{number} state {index} {key}": value for key, value in kept.items()}
    for number, scheduler in enumerate(pipe.stepper.schedulers if pipe.stepper else ()):
        for key, value in deepcopy(scheduler.state_dict()).items():
            found[f"{number} scheduler {key}"] = value
    return found


def difference(found: Everything, wanted: Everything) -> str | None:
    if found.keys() != wanted.keys():
        return f"keys {sorted(found.keys() ^ wanted.keys())}"
    return next((name for name in found if not _is_equal(found[name], wanted[name])), None)


def _is_equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return (
            type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
        )
    return type(a) is type(b) and bool(a == b)


def subject(name: str, folder: Path) -> Subject:
    torch.manual_seed(0)
    pipe, optimizer = made(name)
    right = {}
    for step in (1, 2):
        train(pipe, optimizer, step)
        sl.save(folder / name, pipe, optimizer, step=step, data=DATA)
        right[step] = everything(pipe, optimizer)
    split(folder / name / "step-00000002")
    torch.manual_seed(1)
    for step in (3, 4, 5):
        train(pipe, optimizer, step)
    pipe.seed = 8
    sl.save(folder / f"{name}-other", pipe, optimizer, step=5)
    before = everything(pipe, optimizer)
    found = Subject(name, pipe, optimizer, folder / name, folder / f"{name}-other", right, before)
    assert sl.load(found.folder, pipe, optimizer) == (2, DATA)
    assert difference(everything(pipe, optimizer), right[2]) is None
    restore(found)
    return found


def restore(subject: Subject) -> None:
    """Go back to the state before; what forged checkpoints added goes too."""
    pipe, optimizer = subject.pipe, subject.optimizer
    for number, each in enumerate(pipe.optimizers if optimizer is None else (optimizer,)):
        for index, group in enumerate(each.param_groups):
            for key in group.keys() - {"params"}:
                if f"{number} group {index} {key}" not in subject.before:
                    del group[key]
    for number, scheduler in enumerate(pipe.stepper.schedulers if pipe.stepper else ()):
        for key in scheduler.state_dict():
            if f"{number} scheduler {key}" not in subject.before:
                delattr(scheduler, key)
    sl.load(subject.other, pipe, optimizer)
    wrong = difference(everything(subject.pipe, subject.optimizer), subject.before)
    assert wrong is None, wrong


def split(checkpoint: Path) -> None:
    """Write the tensors of one file to three, as three processes do, with one of them in halves."""
    record = folders.read_record(checkpoint)
    saved = storage.saved_in(checkpoint, [storage.File(**file) for file in record["files"]])
    tensors = {name: entry.form.empty() for name, entry in saved.items()}
    storage.Reader(saved).copy(tensors)
    pieces = storage.pieces_of(tensors)
    whole = pieces.pop("model.0.weight")
    parts: list[dict[str, storage.Piece]] = [{}, {}, {}]
    for number, (name, piece) in enumerate(pieces.items()):
        parts[number % 3][name] = piece
    parts[0]["model.0.weight"] = whole._replace(tensor=whole.tensor[:6])
    parts[2]["model.0.weight"] = whole._replace(tensor=whole.tensor[6:], offset=(6, 0))
    (checkpoint / record["files"][0]["name"]).unlink()
    record["files"] = [
        storage.write(checkpoint / f"shard-{number:05d}.safetensors", part)
        for number, part in enumerate(parts, start=1)
    ]
    seal(checkpoint, record)


def seal(checkpoint: Path, fields: dict[str, Any]) -> None:
    (checkpoint / folders.RECORD).write_bytes(folders._sealed(fields))  # noqa: SLF001


# Damage to the bytes of a file


def a_file(rng: random.Random, checkpoint: Path) -> Path:
    """Return a random one; the record, which is small, as often as the others together."""
    shards = sorted(checkpoint.glob("*.safetensors"))
    return rng.choice([*shards, *[checkpoint / folders.RECORD] * len(shards)])


def changing(change: Callable[[random.Random, bytearray], bytes | bytearray]) -> Damage:
    def damage(rng: random.Random, checkpoint: Path) -> None:
        path = a_file(rng, checkpoint)
        path.write_bytes(change(rng, bytearray(path.read_bytes())))

    damage.__name__ = change.__name__
    return damage


def one_bit_flipped(rng: random.Random, data: bytearray) -> bytearray:
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return data


def one_bit_flipped_in_the_first_bytes(rng: random.Random, data: bytearray) -> bytearray:
    data[rng.randrange(min(len(data), 100))] ^= 1 << rng.randrange(8)
    return data


def several_bits_flipped(rng: random.Random, data: bytearray) -> bytearray:
    for _ in range(rng.randrange(2, 50)):
        data = one_bit_flipped(rng, data)
    return data


def _block(rng: random.Random, data: bytearray) -> slice:
    length = rng.choice([1, 4, 16, 512, 4096])
    start = rng.randrange(len(data))
    return slice(start, min(start + length, len(data)))


def block_of_zeros(rng: random.Random, data: bytearray) -> bytearray:
    where = _block(rng, data)
    data[where] = bytes(where.stop - where.start)
    return data


def block_of_noise(rng: random.Random, data: bytearray) -> bytearray:
    where = _block(rng, data)
    data[where] = rng.randbytes(where.stop - where.start)
    return data


def block_twice(rng: random.Random, data: bytearray) -> bytearray:
    """Somewhere else too, over what was there."""
    block = data[_block(rng, data)]
    start = rng.randrange(len(data) - len(block) + 1)
    data[start : start + len(block)] = block
    return data


def blocks_swapped(rng: random.Random, data: bytearray) -> bytearray:
    length = rng.choice([4, 64, 512])
    a, b = (rng.randrange(max(1, len(data) // length)) * length for _ in range(2))
    one, other = data[a : a + length], data[b : b + length]
    if len(one) == len(other):
        data[a : a + length], data[b : b + length] = other, one
    return data


def cut_short(rng: random.Random, data: bytearray) -> bytearray:
    return data[: rng.randrange(len(data))]


def beginning_lost(rng: random.Random, data: bytearray) -> bytearray:
    return data[rng.randrange(1, len(data)) :]


def bytes_lost(rng: random.Random, data: bytearray) -> bytearray:
    del data[_block(rng, data)]
    return data


def bytes_inserted(rng: random.Random, data: bytearray) -> bytearray:
    start = rng.randrange(len(data))
    data[start:start] = rng.randbytes(rng.choice([1, 8, 500]))
    return data


def garbage_appended(rng: random.Random, data: bytearray) -> bytearray:
    return data + rng.choice([b"\0", b"\n", b" ", b"}", rng.randbytes(1000), bytes(data)])


def as_text_of_another_system(rng: random.Random, data: bytearray) -> bytes:
    old, new = rng.choice([(b"\n", b"\r\n"), (b"\r\n", b"\n"), (b"\xff", b"\xef\xbf\xbd")])
    return bytes(data).replace(old, new)


def as_another_encoding(rng: random.Random, data: bytearray) -> bytes:
    text = bytes(data).decode("latin-1")
    return rng.choice([text.encode("utf-16"), b"\xef\xbb\xbf" + data, zlib.compress(data)])


def reversed_or_filled(rng: random.Random, data: bytearray) -> bytes:
    return rng.choice([bytes(data[::-1]), bytes(len(data)), b"\xff" * len(data)])


def length_in_the_first_bytes(rng: random.Random, data: bytearray) -> bytearray:
    size = rng.choice([0, 1, len(data), 2**31, 2**40, 2**63, 2**64 - 1, rng.randrange(2**64)])
    data[:8] = size.to_bytes(8, "little")
    return data


# Damage to files and folders


def file_missing(rng: random.Random, checkpoint: Path) -> None:
    a_file(rng, checkpoint).unlink()


def file_empty(rng: random.Random, checkpoint: Path) -> None:
    a_file(rng, checkpoint).write_bytes(b"")


def file_is_a_folder(rng: random.Random, checkpoint: Path) -> None:
    path = a_file(rng, checkpoint)
    path.unlink()
    path.mkdir()


def file_is_a_link(rng: random.Random, checkpoint: Path) -> None:
    """To nothing, itself, a folder, a device, or to the file, which is fine."""
    path = a_file(rng, checkpoint)
    kept = path.rename(checkpoint / "elsewhere")
    to = ["nothing", path.name, "..", "/dev/zero", "/dev/null", "/proc/self/mem", kept.name]
    path.symlink_to(rng.choice(to))


def file_is_a_pipe(rng: random.Random, checkpoint: Path) -> None:
    path = a_file(rng, checkpoint)
    path.unlink()
    os.mkfifo(path)


def file_with_a_terabyte_of_nothing(rng: random.Random, checkpoint: Path) -> None:
    os.truncate(a_file(rng, checkpoint), 2**40)


def file_renamed(rng: random.Random, checkpoint: Path) -> None:
    path = a_file(rng, checkpoint)
    path.rename(path.with_name(rng.choice([path.name.upper(), f"{path.name}.bak", "x"])))


def files_swapped(rng: random.Random, checkpoint: Path) -> None:
    one, other = rng.sample(sorted(checkpoint.iterdir()), 2)
    kept = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(kept)


def file_over_another(rng: random.Random, checkpoint: Path) -> None:
    one, other = rng.sample(sorted(checkpoint.iterdir()), 2)
    one.write_bytes(other.read_bytes())


def file_of_another_checkpoint(rng: random.Random, checkpoint: Path) -> None:
    """Of the same run, one step earlier."""
    path = a_file(rng, checkpoint)
    earlier = sorted((checkpoint.parent / "step-00000001").iterdir())
    path.write_bytes(rng.choice(earlier).read_bytes())


def files_added(rng: random.Random, checkpoint: Path) -> None:
    (checkpoint / "shard-00009.safetensors").write_bytes(rng.randbytes(99))
    (checkpoint / "more").mkdir()


def folder_renamed(rng: random.Random, checkpoint: Path) -> None:
    name = rng.choice(["step-00000009", "step-x", "step-00000002.partial", "step-2"])
    checkpoint.rename(checkpoint.with_name(name))


def folder_is_something_else(rng: random.Random, checkpoint: Path) -> None:
    kept = checkpoint.rename(checkpoint.with_name("kept"))
    kind = rng.randrange(4)
    if kind == 0:
        checkpoint.write_text("a file")
    elif kind == 1:
        checkpoint.symlink_to(checkpoint.name)
    elif kind == 2:
        checkpoint.symlink_to(kept.name)
    else:
        checkpoint.mkdir()


# Damage to values


def odd_value(rng: random.Random) -> Any:
    nested: Any = []
    for _ in range(rng.choice([3, 90, 900])):
        nested = rng.choice([[nested], {"x": nested}])
    odd: list[Any] = [None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, 10**400, 1e308, 0.5, -0.0]
    odd += [float("nan"), float("inf"), "x", "", "null", "1", "../x", "\0", "\ud800", "x" * 10**5]
    odd += [[], {}, [None], [1, 2], {"()": 3}, {"{}": [[[], 1]]}, {"{}": 1}, [[]] * 9, nested]
    return rng.choice(odd)


def with_odd_value(rng: random.Random, value: Any) -> Any:
    """Return it with one value, somewhere inside, that is replaced, removed, added or moved."""
    if isinstance(value, dict) and value and rng.random() < 0.95:
        key = rng.choice(list(value))
        kind = rng.random()
        if kind < 0.8:
            return value | {key: with_odd_value(rng, value[key])}
        if kind < 0.9:
            return {k: v for k, v in value.items() if k != key}
        return value | {rng.choice([f"{key}x", "x", "__proto__"]): value[key]}
    if isinstance(value, list) and value and rng.random() < 0.9:
        index = rng.randrange(len(value))
        kind = rng.random()
        if kind < 0.8:
            return [*value[:index], with_odd_value(rng, value[index]), *value[index + 1 :]]
        return value[:index] + value[index + 1 :] if kind < 0.9 else [*value, value[index]]
    if isinstance(value, int) and not isinstance(value, bool) and rng.random() < 0.5:
        return value + rng.choice([-1, 1, 4, 2**20, 2**40, 2**62])
    return odd_value(rng)


def value_in_the_record(rng: random.Random, checkpoint: Path) -> None:
    """As an editor would: it stays JSON, and keeps its first line or is written anew."""
    path = checkpoint / folders.RECORD
    text = path.read_text()
    changed = with_odd_value(rng, json.loads(text))
    again = json.dumps(changed, indent=rng.choice([None, 1]))
    path.write_text(rng.choice([again, text.split("\n")[0] + "\n" + again.removeprefix("{")]))


def value_in_a_header(rng: random.Random, checkpoint: Path) -> None:
    rewrite_header(rng, rng.choice(sorted(checkpoint.glob("*.safetensors"))))


def rewrite_header(rng: random.Random, path: Path) -> None:
    """Change a value; the length in front, and often that of the file, are kept right."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    fields = json.loads(data[8 : 8 + length])
    if rng.random() < 0.4:
        own = with_odd_value(rng, json.loads(fields["__metadata__"]["stageline"]))
        fields["__metadata__"]["stageline"] = json.dumps(own)
    else:
        fields = with_odd_value(rng, fields)
    text = json.dumps(fields).encode()
    if rng.random() < 0.7:
        text = text[:length].ljust(length)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def forged_record(rng: random.Random, checkpoint: Path) -> None:
    fields = with_odd_value(rng, folders.read_record(checkpoint))
    seal(checkpoint, fields if isinstance(fields, dict) else {"data": fields})


def forged_header(rng: random.Random, checkpoint: Path) -> None:
    record = folders.read_record(checkpoint)
    file = rng.choice(record["files"])
    path = checkpoint / file["name"]
    rewrite_header(rng, path)
    forge(path, file)
    seal(checkpoint, record)


def forged_giant(rng: random.Random, checkpoint: Path) -> None:
    """A tensor of terabytes, in a file that is as long as that, but has holes."""
    record = folders.read_record(checkpoint)
    file = rng.choice(record["files"])
    path = checkpoint / file["name"]
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    fields = json.loads(data[8 : 8 + length])
    names = [name for name in fields if name != "__metadata__"]
    last = max(names, key=lambda name: fields[name]["data_offsets"][1])
    start, _ = fields[last]["data_offsets"]
    size = rng.choice([2**34, 2**42, 2**50])
    fields[last] |= {"dtype": "U8", "shape": [size], "data_offsets": [start, start + size]}
    own = json.loads(fields["__metadata__"]["stageline"])
    own[last] |= {"offset": [0], "whole": [size]}
    fields["__metadata__"]["stageline"] = json.dumps(own)
    text = json.dumps(fields).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    try:
        os.truncate(path, 8 + len(text) + start + size)
    except OSError:  # longer than files can be here
        return
    forge(path, file)
    seal(checkpoint, record)


def forge(path: Path, file: dict[str, Any]) -> None:
    with path.open("rb") as opened:
        length = 8 + int.from_bytes(opened.read(8), "little")
        opened.seek(0)
        header = opened.read(length)
    file |= {
        "num_bytes": path.stat().st_size,
        "header_bytes": length,
        "crc32": zlib.crc32(header),
    }


CHANGES = (
    *(one_bit_flipped,) * 6,
    *(one_bit_flipped_in_the_first_bytes, several_bits_flipped, block_of_zeros, block_of_noise),
    *(block_twice, blocks_swapped, cut_short, beginning_lost, bytes_lost, bytes_inserted),
    *(garbage_appended, as_text_of_another_system, as_another_encoding, reversed_or_filled),
    length_in_the_first_bytes,
)
KINDS: list[Damage] = [
    *(changing(change) for change in CHANGES),
    *[file_missing, file_empty, file_is_a_folder, file_is_a_link, file_is_a_pipe],
    *[file_with_a_terabyte_of_nothing, file_renamed, files_swapped, file_over_another],
    *[file_of_another_checkpoint, files_added, folder_renamed, folder_is_something_else],
    *[value_in_the_record] * 4,
    *[value_in_a_header] * 4,
    *[forged_record] * 4,
    *[forged_header] * 4,
    forged_giant,
]


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise `TimeoutError` in what takes longer."""

    def late(*_: Any) -> None:
        raise TimeoutError(f"it took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def attempt(rng: random.Random, subject: Subject, damage: Damage, folder: Path) -> tuple[str, str]:
    """Damage a copy, load it, and return how that ended and what was said."""
    here = folder / "run"
    shutil.rmtree(here, ignore_errors=True)
    shutil.copytree(subject.folder, here)
    checkpoint = here / "step-00000002"
    damage(rng, checkpoint)
    is_alone = rng.random() < 0.5
    if is_alone and damage is not file_of_another_checkpoint:
        shutil.rmtree(here / "step-00000001")
    path = rng.choice([here, checkpoint])
    optimizer = None if rng.random() < 0.1 else subject.optimizer
    try:
        with limited(SECONDS), warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            step, data = sl.load(path, subject.pipe, optimizer)
    except sl.CheckpointError as error:
        wrong = difference(everything(subject.pipe, subject.optimizer), subject.before)
        return ("refused" if wrong is None else f"CHANGED {wrong}"), str(error)
    except Exception as error:
        return f"RAISED {type(error).__name__}", str(error)
    found = everything(subject.pipe, subject.optimizer)
    restore(subject)
    if damage.__name__.startswith("forged"):
        return "loaded what it says", ""
    wanted = dict(subject.right[step])
    if optimizer is None and subject.optimizer is not None:
        wanted |= {name: subject.before[name] for name in wanted if name.startswith("0 ")}
        wanted = {name: value for name, value in wanted.items() if name in subject.before}
        wanted |= {n: value for n, value in subject.before.items() if n.startswith("0 ")}
    wrong = difference(found, wanted)
    if wrong is not None or data != DATA:
        return f"WRONG {wrong or data}", ""
    if step == 2:
        return "loaded", ""
    is_told = any("is passed over" in str(each.message) for each in told)
    is_gone = not (checkpoint.is_dir() and path == here)
    return ("loaded the one before" if is_told or is_gone else "SILENT: the one before"), ""


def main(
    cases: Annotated[int, typer.Option(help="Damaged checkpoints in all.")] = 10_000,
    seed: Annotated[int, typer.Option(help="Of the damage.")] = 0,
    only: Annotated[int | None, typer.Option(help="Repeat a single case.")] = None,
) -> None:
    """Damage checkpoints in every way that we know of, load them, and count what happens."""
    torch.set_num_threads(1)
    console = Console(width=120)
    counts: Counter[tuple[str, str]] = Counter()
    failures: list[str] = []
    slowest = 0.0
    with TemporaryDirectory() as name:
        subjects = [subject(kind, Path(name)) for kind in ("adamw", "sgd", "owned")]
        start_bytes = peak()
        chosen = range(cases) if only is None else [only]
        for case in track(chosen, "loading damaged checkpoints", console=console):
            rng = random.Random(f"{seed}.{case}")
            damage = KINDS[case % len(KINDS)]
            each = subjects[case // len(KINDS) % len(subjects)]
            torch.set_rng_state(each.before["random"])
            start, bytes_before = time.perf_counter(), peak()
            outcome, words = attempt(rng, each, damage, Path(name))
            seconds = time.perf_counter() - start
            slowest = max(slowest, seconds)
            if seconds > SECONDS or peak() - bytes_before > BYTES:
                outcome = f"TOO MUCH: {seconds:.1f} s, {(peak() - bytes_before) / 2**20:.0f} MiB"
            is_failure = outcome[:2].isupper()
            counts[damage.__name__, "FAILED" if is_failure else outcome] += 1
            if is_failure:
                failures.append(f"case {case}, {each.name}, {damage.__name__}: {outcome} {words}")
                restore_from_scratch(each)
            if only is not None:
                console.print(f"{damage.__name__}: {outcome}: {words}", markup=False)
    report(console, counts)
    console.print(
        f"{sum(counts.values())} damaged checkpoints, {len(failures)} failures; the slowest took "
        f"{slowest:.2f} s, all of them {(peak() - start_bytes) / 2**20:.0f} MiB more than before"
    )
    for failure in failures[:20]:
        console.print(failure[:600], markup=False)
    sys.exit(bool(failures))


def restore_from_scratch(subject: Subject) -> None:
    """Go on with a state that is known after a failure, as far as that can be."""
    try:
        restore(subject)
    except AssertionError:
        subject.before = everything(subject.pipe, subject.optimizer)


def peak() -> int:
    """Return the most bytes that this process had in memory so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def report(console: Console, counts: Counter[tuple[str, str]]) -> None:
    outcomes = sorted({outcome for _, outcome in counts})
    table = Table("damage", *outcomes, box=None)
    for kind in dict.fromkeys(each.__name__ for each in KINDS):
        table.add_row(
            kind.replace("_", " "), *(str(counts[kind, outcome] or "") for outcome in outcomes)
        )
    table.add_section()
    totals: Counter[str] = Counter()
    for (_, outcome), count in counts.items():
        totals[outcome] += count
    table.add_row("all", *(str(totals[outcome]) for outcome in outcomes))
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
