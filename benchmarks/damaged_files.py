"""Read damaged files of every kind that the command line or the Python API reads.

    a valid file ─► damaged by one or more of a dozen ways ─► read and used ─► result or error?

Each try must end with a result or one of Stageline's own errors, in less than 5 seconds and with
less than 1 GiB of memory. Tries run in a worker process with a limit on its address space; if it
dies or exceeds the time, that try has failed, and another worker continues with the next one. A try
is determined by its number: `--only 1234` repeats it.

    python benchmarks/damaged_files.py                  105,000 tries, about half an hour
    python benchmarks/damaged_files.py --only 1234      one of them again, with its file shown
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import resource
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from typer.main import get_command

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.damage_kinds.text_faults import damaged, damaged_command
from benchmarks.damage_kinds.text_files import KINDS, command, use_costs

import stageline as sl

SECONDS, BYTES = 5.0, 2**30


TIMEOUT = 60.0  # seconds until a try is stopped, on a busy machine


OPTIONS, SHARE_OF_OPTIONS = "options", 0.03


class Try(NamedTuple):
    """One damaged file, and the function that uses it."""

    kind: str
    use: Callable[[Path], None]
    data: bytes
    suffix: str


class Outcome(NamedTuple):
    """The verdict on a try: "result", "error", or a failure."""

    kind: str
    verdict: str
    seconds: float
    text: str = ""


def attempt(number: int, seed: int, examples: dict[str, list[str]]) -> Try:
    rng = random.Random(f"{seed}/{number}")
    kind = OPTIONS if rng.random() < SHARE_OF_OPTIONS else rng.choice(tuple(KINDS))
    if kind == OPTIONS:
        words = damaged_command(rng)
        return Try(kind, command(*words), " ".join(words).encode(errors="replace"), ".txt")
    data = damaged(rng.choice(examples[kind]), rng)
    return Try(kind, rng.choice(KINDS[kind].uses), data, KINDS[kind].suffix)


def judge(tried: Try, folder: Path) -> Outcome:
    path = folder / f"damaged{tried.suffix}"
    path.write_bytes(tried.data)
    start = time.process_time()  # does not count other processes
    try:
        tried.use(path)
        verdict, text = "result", ""
    except sl.StagelineError as error:
        verdict, text = "error", str(error)
    except ValueError as error:
        is_json = tried.use is use_costs and isinstance(error, json.JSONDecodeError | UnicodeError)
        is_ours = is_json or "integer string conversion" in str(error)  # of json.loads
        verdict = "error" if tried.use is use_costs and is_ours else "another exception"
        text = traceback.format_exc(limit=-6)
    except (Exception, RecursionError) as error:
        own = tried.use is use_costs and isinstance(
            error, RecursionError | TypeError | AttributeError
        )
        is_loading = own and "json" in traceback.format_exc() + str(error)
        is_mapping = own and "mapping" in str(error)  # **values that are not a mapping
        verdict = "error" if is_loading or is_mapping else "another exception"
        text = traceback.format_exc(limit=-6)
    seconds = time.process_time() - start
    if seconds > SECONDS:
        verdict = f"took {seconds:.1f} s"
    return Outcome(tried.kind, verdict, seconds, text[-3000:])


def work(pipe: Connection, seed: int) -> None:
    """Judge the tries whose numbers are received, until None is; runs in its own process."""
    examples = {name: list(kind.examples()) for name, kind in KINDS.items()}
    from stageline.cli import app, launch  # noqa: F401, PLC0415  before memory counts

    vars(app)["app"] = get_command(app.app)  # typer would make it again for each try
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    with open("/proc/self/statm") as status:  # noqa: PTH123
        size = int(status.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + BYTES, size + BYTES))
    pipe.send("ready")
    with tempfile.TemporaryDirectory() as folder:
        while (number := pipe.recv()) is not None:
            outcome = judge(attempt(number, seed, examples), Path(folder))
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
            if peak > BYTES and outcome.verdict in ("result", "error"):
                outcome = outcome._replace(verdict=f"took {peak / 2**20:.0f} MiB")
            pipe.send(outcome)


class Worker:
    """A worker process and the pipe to it, replaced when it dies or exceeds the time."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._start()

    def _start(self) -> None:
        self.pipe, there = multiprocessing.Pipe()
        self.process = multiprocessing.get_context("spawn").Process(
            target=work, args=(there, self.seed), daemon=True
        )
        self.process.start()
        there.close()
        assert self.pipe.recv() == "ready"

    def judge(self, number: int) -> Outcome:
        self.pipe.send(number)
        try:
            if self.pipe.poll(TIMEOUT):
                outcome: Outcome = self.pipe.recv()
                if outcome.verdict in ("result", "error"):
                    return outcome
                self._end()
                self._start()  # its memory use must not count for the next try
                return outcome
            verdict = f"did not end within {TIMEOUT:.0f} s"
        except EOFError:
            self.process.join()
            verdict = f"the process died ({self.process.exitcode})"
        self._end()
        self._start()
        return Outcome("?", verdict, TIMEOUT)

    def close(self) -> None:
        self.pipe.send(None)
        self.process.join()

    def _end(self) -> None:
        self.process.kill()
        self.process.join()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tries", type=int, default=105_000)
    parser.add_argument("--first", type=int, default=0, help="Number of the first try.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="Run one try, and show its file and error.")
    parser.add_argument("--failures", type=int, default=20, help="Stop after this many failures.")
    given = parser.parse_args()
    if given.only is not None:
        return show(given.only, given.seed)
    counts: Counter[tuple[str, str]] = Counter()
    failures: list[int] = []
    start, slowest = time.monotonic(), 0.0
    worker = Worker(given.seed)
    for number in range(given.first, given.first + given.tries):
        outcome = worker.judge(number)
        slowest = max(slowest, outcome.seconds)
        is_right = outcome.verdict in ("result", "error")
        counts[outcome.kind, outcome.verdict if is_right else "FAILED"] += 1
        if not is_right:
            failures.append(number)
            print(f"try {number} ({outcome.kind}): {outcome.verdict}\n{outcome.text}", flush=True)
        done = number - given.first + 1
        if done % 5000 == 0:
            rate = done / (time.monotonic() - start)
            print(f"{done:,} tries, {rate:.0f} a second, {len(failures)} failures", flush=True)
        if len(failures) >= given.failures:
            break
    worker.close()
    print(f"\n{'kind':>10}  {'results':>8}  {'errors':>8}  {'failures':>8}")
    for kind in (*KINDS, OPTIONS, "?"):
        row = [counts[kind, verdict] for verdict in ("result", "error", "FAILED")]
        if any(row):
            print(f"{kind:>10}  " + "  ".join(f"{count:>8,}" for count in row))
    print(f"{sum(counts.values()):,} tries, seed {given.seed}; the slowest took {slowest:.2f} s")
    return bool(failures)


def show(number: int, seed: int) -> int:
    examples = {name: list(kind.examples()) for name, kind in KINDS.items()}
    tried = attempt(number, seed, examples)
    print(f"{tried.kind}, {len(tried.data):,} bytes:\n{tried.data[:3000]!r}\n")
    with tempfile.TemporaryDirectory() as folder:
        outcome = judge(tried, Path(folder))
    print(f"{outcome.verdict} after {outcome.seconds:.2f} s\n{outcome.text}")
    return outcome.verdict not in ("result", "error")


if __name__ == "__main__":
    sys.exit(main())
