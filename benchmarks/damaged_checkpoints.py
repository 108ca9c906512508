"""Damaged checkpoints: each loads exactly what was saved, or is refused with nothing changed.

python benchmarks/damaged_checkpoints.py                       10,000 of them, some minutes
python benchmarks/damaged_checkpoints.py --cases 500 --seed 7
python benchmarks/damaged_checkpoints.py --seed 7 --only 123   one again, with its message

"Forged" checkpoints have valid checksums in spite of the damage, unlike accidental damage. They may
load other values, but must not fail in other ways.
"""

from __future__ import annotations

import random
import resource
import shutil
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
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

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.damage_kinds.in_bytes import Damage
from benchmarks.damage_kinds.in_values import seal
from benchmarks.damage_kinds.kinds import KINDS

import stageline as sl
from stageline.checkpoint import read_tensors, record_file, write_tensors
from stageline.checkpoint.pipeline_state import schedulers_of
from stageline.pipeline import session_of
from stageline.zoo.cases import grouped
from stageline.zoo.gpt import Head, loss

SECONDS, BYTES = 5.0, 2**30  # limits for a damaged checkpoint
DATA = {"seen": 18, "order": [3, 1, 2], "epoch": (4, None), 7: "x"}
Everything = dict[str, Any]


@dataclass
class Subject:
    """A pipeline with its optimizer, checkpoints of it, and the state after loading them."""

    name: str
    pipe: sl.Pipeline
    optimizer: Optimizer | None
    folder: Path  # two checkpoints, steps 1 and 2
    other: Path  # a checkpoint of the state before each case
    right: dict[int, Everything]  # by step
    before: Everything


def model() -> nn.Sequential:
    """Return a model with tied weights, dropout, statistics with a counter, and several dtypes."""
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
        model(),
        loss,
        num_ranks=2,
        num_microbatches=2,
        backend="serial",
        options=sl.Options(seed=3),
        **grouped(options),
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
    found["counts"] = [pipe.num_steps, session_of(pipe).seed]
    for number, each in enumerate(pipe.optimizers if optimizer is None else (optimizer,)):
        state = deepcopy(each.state_dict())
        for index, group in enumerate(state["param_groups"]):
            found |= {f"{number} group {index} {key}": value for key, value in group.items()}
        for index, kept in state["state"].items():
            found |= {f"{number} state {index} {key}": value for key, value in kept.items()}
    for number, scheduler in enumerate(schedulers_of(pipe)):
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
    for step in right:
        split(folder / name / f"step-{step:08d}")
    torch.manual_seed(1)
    for step in (3, 4, 5):
        train(pipe, optimizer, step)
    session_of(pipe).seed = 8
    sl.save(folder / f"{name}-other", pipe, optimizer, step=5)
    before = everything(pipe, optimizer)
    found = Subject(name, pipe, optimizer, folder / name, folder / f"{name}-other", right, before)
    assert sl.load(found.folder, pipe, optimizer) == (2, DATA)
    assert difference(everything(pipe, optimizer), right[2]) is None
    restore(found)
    return found


def restore(subject: Subject) -> None:
    """Restore the state before; remove what forged checkpoints added."""
    pipe, optimizer = subject.pipe, subject.optimizer
    for number, each in enumerate(pipe.optimizers if optimizer is None else (optimizer,)):
        for index, group in enumerate(each.param_groups):
            for key in group.keys() - {"params"}:
                name = f"{number} group {index} {key}"
                if name in subject.before:
                    group[key] = deepcopy(subject.before[name])
                else:
                    del group[key]
    for number, scheduler in enumerate(schedulers_of(pipe)):
        for key in scheduler.state_dict():
            if f"{number} scheduler {key}" not in subject.before:
                delattr(scheduler, key)
    sl.load(subject.other, pipe, optimizer)
    wrong = difference(everything(subject.pipe, subject.optimizer), subject.before)
    assert wrong is None, wrong


def split(checkpoint: Path) -> None:
    """Write the tensors of one file to three, as three processes do, with one of them in halves."""
    record = record_file.read_record(checkpoint)
    saved = read_tensors.stored_tensors(
        checkpoint, [write_tensors.ShardFile(**file) for file in record["files"]]
    )
    tensors = {name: entry.type.empty() for name, entry in saved.items()}
    read_tensors.TensorReader(saved).copy(tensors)
    pieces = write_tensors.local_pieces(tensors)
    whole = pieces.pop("model.0.weight")
    parts: list[dict[str, write_tensors.Piece]] = [{}, {}, {}]
    for number, (name, piece) in enumerate(pieces.items()):
        parts[number % 3][name] = piece
    parts[0]["model.0.weight"] = whole._replace(tensor=whole.tensor[:6])
    parts[2]["model.0.weight"] = whole._replace(tensor=whole.tensor[6:], offset=(6, 0))
    (checkpoint / record["files"][0]["name"]).unlink()
    record["files"] = [
        write_tensors.write_shard(checkpoint / f"shard-{number:05d}.safetensors", part)
        for number, part in enumerate(parts, start=1)
    ]
    seal(checkpoint, record)


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise `TimeoutError` if the block takes longer."""

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
    """Damage a copy, load it, and return the outcome and the error."""
    here = folder / "run"
    shutil.rmtree(here, ignore_errors=True)
    shutil.copytree(subject.folder, here)
    checkpoint = here / "step-00000002"
    damage(rng, checkpoint)
    is_alone = rng.random() < 0.5
    if is_alone:
        shutil.rmtree(here / "step-00000001")
    path = rng.choice([here, checkpoint])
    optimizer = None if rng.random() < 0.1 else subject.optimizer
    try:
        with limited(SECONDS), warnings.catch_warnings(record=True) as warned:
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
        return "loaded forged values", ""
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
    has_warned = any("skipped " in str(each.message) for each in warned)
    is_gone = not (checkpoint.is_dir() and path == here)
    return ("loaded the one before" if has_warned or is_gone else "SILENT: the one before"), ""


def main(
    cases: Annotated[int, typer.Option(help="Number of damaged checkpoints.")] = 10_000,
    seed: Annotated[int, typer.Option(help="Seed of the damage.")] = 0,
    only: Annotated[int | None, typer.Option(help="Repeat a single case.")] = None,
) -> None:
    """Damage checkpoints in every known way, load them, and count the outcomes."""
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
    """Restore the state after a failure, or else accept the current one."""
    try:
        restore(subject)
    except AssertionError:
        subject.before = everything(subject.pipe, subject.optimizer)


def peak() -> int:
    """Return the peak memory of this process in bytes."""
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
