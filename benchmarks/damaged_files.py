"""Read damaged files of every kind that the command line or the Python API reads.

    a valid file ─► damaged by one or more of a dozen ways ─► read and used ─► result or error?

Each try has to end with a result or one of Stageline's own errors, in less than 5 seconds and with
less than 1 GiB of memory. Tries run in a worker process with a limit on its address space; when it
dies or is too late, that try has failed, and another worker goes on with the next one. A try is
known by its number: `--only 1234` repeats it, whatever the others were.

    python benchmarks/damaged_files.py                  105,000 tries, about half an hour
    python benchmarks/damaged_files.py --only 1234      one of them again, with its file shown
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing
import random
import resource
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from typer.main import get_command

import stageline as sl
from stageline.planning.partition.pipedream import pipedream_partition
from stageline.planning.partition.pipedream_graph import read_graph, to_profile
from stageline.planning.profiling.profile_result import (
    LayerCost,
    Measurement,
    Profile,
    TiedParameter,
    ValueCost,
)

SECONDS, BYTES = 5.0, 2**30
PATIENCE = 60.0  # seconds for a try that does not end, on a machine that has other things to do
NUMBERS = (
    *("0", "-1", "-0.0", "1e308", "1e-308", "1e309", "-1e308", "NaN", "Infinity", "-Infinity"),
    *("5e-324", "1e60", "1e-60", "1e61", "99999999999", "100000000000000", "1000000000"),
    *("9" * 5000, "0." + "0" * 5000 + "1", "1e99999", "2147483648", "9223372036854775808"),
    *("true", "false", "null", '"1"', "0x10", "01", "1.5"),
)
LARGE = (
    "1_000",
    "10001",
    "65536",
    "100001",
)  # sizes of which some can be worked with, and take a while
WORDS = (
    "links",
    "forward",
    "F",
    "B",
    "STEP",
    "@",
    ">",
    "SEND_F",
    "OVERLAP_F_B",
    "stage_id=",
    " -- ",
)
PIECES = (
    "{",
    "}",
    "[",
    "]",
    '"',
    ",",
    ":",
    "\n",
    "\r",
    "\t",
    "\0",
    "\ufeff",
    "\ud7ff",
    " ",
    "'",
    "=",
)


# --- the valid files ---------------------------------------------------------------------------


def schedules() -> Iterator[str]:
    """CSV files of schedules."""
    for name in sl.schedule_names():
        schedule = sl.build_schedule(name, num_ranks=3, num_microbatches=6)
        yield "\n".join(",".join(map(str, row)) for row in schedule.actions)
    replicated = sl.build_schedule("pipedream", num_ranks=3, num_microbatches=2, replicas=[2, 1])
    yield "\n".join(",".join(map(str, row)) for row in replicated.actions)
    yield "0F0,,0F1,(0B0;0F2)OVERLAP_F_B,0UNSHARD,0B1,0B2\n"


def programs() -> Iterator[str]:
    """CSV files with sends, receives, reductions and steps."""
    for name in ("1f1b", "zbv", "pipedream"):
        program = sl.lower(sl.build_schedule(name, num_ranks=2, num_microbatches=2))
        yield "\n".join(",".join(map(str, row)) for row in program.actions)


def costs() -> Iterator[str]:
    yield json.dumps({"forward": 1.1, "input_grad": [1, 2.5, 1e-3], "transfer": 0.05})
    yield json.dumps({"links": {"latency": 0.5, "bandwidth": 1e9}, "message": [1e6, 2e6, 0]})
    yield json.dumps({"activation": 2e9, "retained": 1e9, "parameters": [4e9, 3e9, 5e9], "step": 1})
    yield json.dumps({"recompute": 1, "working_set": 2, "gradients": 3, "optimizer_state": 4})


def profile() -> Profile:
    layer = LayerCost(1e-3, 2e-3, 1e-3, 1000, 800, 4096, 16, 10, 1e-5, 1e-5, 64)
    twice = LayerCost(2e-3, 4e-3, 2e-3, 2000, 1600, 4096, 16, 20, 1e-5, 1e-5, 128)
    values = (ValueCost(-1, (0,), 64), ValueCost(0, (1, 2), 256, 32, (2,)), ValueCost(1, (2,), 256))
    sizes = (Measurement(1, (layer,) * 3, values), Measurement(2, (twice,) * 3, values))
    return Profile(("a", "b", "c"), sizes, (TiedParameter((0, 2), 4096),), "a device")


def cluster() -> sl.Cluster:
    return sl.Cluster(2, "1MiB", levels=(sl.Level("machine", 2, 1e9, 1e-5),), host_bandwidth=1e9)


def saved(*values: Any) -> Iterator[str]:
    """Each as the text of its file."""
    with tempfile.TemporaryDirectory() as folder:
        for value in values:
            value.save(path := Path(folder) / "saved.json")
            yield path.read_text()


def plans() -> Iterator[str]:
    found = [
        sl.plan(profile(), cluster(), batch_size=4, schedules=[name])
        for name in ("1f1b", "zb_h1", "pipedream")
    ]
    yield from saved(*found)


def clusters() -> Iterator[str]:
    yield from saved(cluster(), sl.Cluster(2, devices=(sl.Device("1GiB"), sl.Device(2e9, 0.5))))


def graphs() -> Iterator[str]:
    path = Path(__file__).parents[1] / "tests" / "figures" / "vgg16.graph.txt"
    lines = path.read_text().splitlines()
    nodes, edges = ([x for x in lines if x[:1].isspace() == is_edge] for is_edge in (False, True))
    names = {line.split(" -- ")[0] for line in nodes[:8]}
    kept = [line for line in edges if {part.strip() for part in line.split(" -- ")} <= names]
    yield "\n".join(nodes[:8] + kept)
    costs = "forward_compute_time=0, backward_compute_time=0, parameter_size=0"
    yield f"node1 -- Input -- {costs}, activation_size=[1.0; 2.0] -- stage_id=0\n"


# --- what is done with them -------------------------------------------------------------------


def command(*arguments: str) -> Callable[[Path], None]:
    """The command line, in process; FILE stands for the damaged one."""

    def call(path: Path) -> None:
        from stageline.cli import main  # noqa: PLC0415  a worker imports it once

        words = [str(path) if word == "FILE" else word for word in arguments]
        sys.argv = ["stageline", *words]
        told = io.StringIO()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(told):
            try:
                main()
            except SystemExit as stop:
                code = stop.code or 0
        if code not in (0, 1, 2) or (code and not told.getvalue().strip()):
            raise AssertionError(f"exit code {code}, and this was said: {told.getvalue()!r}")
        if code == 2 and "error" not in told.getvalue().lower():
            raise AssertionError(f"not an error: {told.getvalue()!r}")
        if code:
            raise sl.StagelineError(told.getvalue())

    return call


def use_schedule(path: Path) -> None:
    schedule = sl.Schedule.from_csv(path)
    repr(schedule), str(schedule)
    sl.check(schedule)
    timeline = sl.simulate(schedule)
    str(timeline), timeline.peak_memory, timeline.lower_bound
    sl.check(sl.lower(schedule))
    timeline.save(path.with_suffix(".svg"))


def use_costs(path: Path) -> None:
    values = json.loads(path.read_text(encoding="utf-8"))  # what a user would do
    costs = sl.Costs.of_a_rank(1, **values)
    for name in ("1f1b", "zb_1p"):
        schedule = sl.build_schedule(name, num_ranks=3, num_microbatches=4, costs=costs)
        str(sl.simulate(schedule, costs))


def use_profile(path: Path) -> None:
    found = sl.Profile.load(path)
    str(found)
    found.at(3)
    str(sl.plan(found, cluster(), batch_size=4, schedules=["1f1b", "gpipe"]))


def use_cluster(path: Path) -> None:
    found = sl.Cluster.load(path)
    str(found)
    str(sl.plan(profile(), found, batch_size=4, schedules=["1f1b", "gpipe"]))


def use_plan(path: Path) -> None:
    found = sl.Plan.load(path)
    str(found), str(found.timeline), found.throughput, found.recompute_modes
    found.save(path.with_suffix(".again"))


def use_graph(path: Path) -> None:
    graph = read_graph(path)
    pipedream_partition(graph, 4)
    str(to_profile(graph))


class Kind(NamedTuple):
    """Files of one kind, and what is done with each."""

    suffix: str
    examples: Callable[[], Iterator[str]]
    uses: tuple[Callable[[Path], None], ...]


KINDS = {
    "schedule": Kind(
        ".csv", schedules, (use_schedule, command("simulate", "FILE"), command("draw", "FILE"))
    ),
    "program": Kind(".csv", programs, (use_schedule, command("draw", "FILE"))),
    "costs": Kind(
        ".json",
        costs,
        (
            use_costs,
            command("simulate", "1f1b", "-p", "3", "-m", "4", "--costs", "FILE"),
            command("draw", "zbv", "-p", "2", "-m", "4", "--costs", "FILE"),
            command("simulate", "gpipe", "interleaved_1f1b", "-p", "3", "--costs", "FILE"),
        ),
    ),
    "profile": Kind(
        ".json",
        lambda: saved(profile()),
        (
            use_profile,
            command(
                *("plan", "FILE", "--devices", "2", "--memory", "1MiB", "--batch", "4"),
                *("--schedule", "1f1b", "--save", "/dev/null"),
            ),
        ),
    ),
    "cluster": Kind(".json", clusters, (use_cluster,)),
    "plan": Kind(".json", plans, (use_plan,)),
    "graph": Kind(".txt", graphs, (use_graph,)),
}
# What stands on the command line itself, damaged word by word.
COMMANDS = (
    ("draw", "1f1b", "-p", "4", "-m", "8", "--forward", "1,1.2,0.9,1", "--transfer", "0.1"),
    ("draw", "interleaved_1f1b", "-p", "2", "-m", "4", "--chunks", "2", "--group-size", "2"),
    ("draw", "zb_1p", "-p", "3", "-m", "3", "--memory-limit", "22", "--time-budget", "0.01"),
    ("draw", "zb_2p", "-p", "2", "-m", "3", "--memory-limit", "1GiB", "--activation", "1e6"),
    ("simulate", "pipedream", "-p", "4", "-m", "3", "--replicas", "3,1", "--minibatches", "4"),
    ("simulate", "gpipe", "zbv", "hanayo", "-p", "3", "-m", "4", "--retained", "0.5"),
    ("run", "--ranks", "0", "--max-restarts", "1", "nowhere.py"),
    ("verify", "nowhere:build", "1f1b", "--ranks", "2", "--microbatches", "4"),
    ("profile", "nowhere:build", "--ranks", "1"),
    ("plan", "nowhere:build", "--devices", "2", "--memory", "1GiB", "--batch", "4"),
)
OPTIONS, SHARE_OF_OPTIONS = "options", 0.03


# --- damage -----------------------------------------------------------------------------------


def damaged(text: str, rng: random.Random) -> bytes:
    """The file after one to four faults."""
    data = text.encode("utf-8", errors="surrogatepass")
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        data = rng.choice(FAULTS)(data, rng)
    return data


def flip(data: bytes, rng: random.Random) -> bytes:
    if not data:
        return b"\0"
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 16))):
        found[rng.randrange(len(found))] ^= 1 << rng.randrange(8)
    return bytes(found)


def cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def remove(data: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(data) + 1)
    return data[:start] + data[start + rng.randrange(1, 40) :]


def repeat(data: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(data) + 1)
    piece = data[start : start + rng.choice((1, 8, 64, 512))]
    return data[:start] + piece * rng.choice((2, 3, 50)) + data[start:]


def insert(data: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(data) + 1)
    piece = rng.choice((*PIECES, *WORDS, *NUMBERS)).encode("utf-8", errors="surrogatepass")
    return data[:start] + piece * rng.choice((1, 1, 1, 2)) + data[start:]


def other_number(data: bytes, rng: random.Random) -> bytes:
    """One of the numbers in it, replaced by an extreme one or by another of them."""
    text = data.decode("latin-1")
    places = list(numbers_in(text))
    if not places:
        return data
    first, last = rng.choice(places)
    a, b = rng.choice(places)
    number = rng.choice((*NUMBERS, *LARGE, text[a:b], text[a:b]))
    return (text[:first] + number + text[last:]).encode("latin-1", errors="replace")


def numbers_in(text: str) -> Iterator[tuple[int, int]]:
    position = 0
    while position < len(text):
        end = position
        while end < len(text) and (text[end].isdigit() or text[end] in ".e-+"):
            end += 1
        if end > position and any(c.isdigit() for c in text[position:end]):
            yield position, end
        position = max(end, position + 1)


def other_word(data: bytes, rng: random.Random) -> bytes:
    words = data.split()
    if not words:
        return data
    return data.replace(rng.choice(words), rng.choice(words), 1)


def lines_in_another_order(data: bytes, rng: random.Random) -> bytes:
    lines = data.splitlines(keepends=True)
    kept = [line for line in lines if rng.random() > 0.1]
    if rng.random() < 0.5:
        rng.shuffle(kept)
    return b"".join(kept + rng.sample(lines, min(len(lines), rng.randrange(3))))


def deep(data: bytes, rng: random.Random) -> bytes:
    depth = rng.choice((50, 1000, 100_000))
    opening, closing = rng.choice(((b"[", b"]"), (b'{"a":', b"}"), (b"(", b")")))
    start = rng.randrange(len(data) + 1)
    return data[:start] + opening * depth + b"1" + closing * depth + data[start:]


def other_encoding(data: bytes, rng: random.Random) -> bytes:
    name = rng.choice(("utf-16", "utf-32", "utf-16-le", "latin-1", "cp037", "utf-8-sig", "utf-7"))
    return data.decode("latin-1").encode(name, errors="replace")


def other_json(data: bytes, rng: random.Random) -> bytes:
    """A value of another type, a key less, a key twice, or one more."""
    try:
        value = json.loads(data)
        places = list(places_in(value))
    except (ValueError, RecursionError):
        return other_number(data, rng)
    holder, key = rng.choice(places) if places else ([value], 0)
    choice = rng.randrange(5)
    if choice == 0 and isinstance(holder, dict):
        del holder[key]
    elif choice == 1 and isinstance(holder, dict):
        holder[rng.choice(("speed", "", "links", "é", "x" * 5000))] = holder[key]
    elif choice == 2:
        holder[key] = rng.choice(
            (None, True, "", "x", [], {}, [[]], [1], {"a": 1}, -1, 0.5, 10**400)
        )
    elif choice == 3:
        other, name = rng.choice(places) if places else ([value], 0)
        holder[key] = json.loads(json.dumps(other[name]))
    else:
        holder[key] = [holder[key]] * rng.choice((1, 2, 1000))
    return json.dumps(value).encode()


def places_in(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every holder with each of its keys."""
    if not isinstance(value, dict | list):
        return
    keys = value.keys() if isinstance(value, dict) else range(len(value))
    for key in keys:
        yield value, key
        yield from places_in(value[key])


def large(data: bytes, rng: random.Random) -> bytes:
    return data * rng.choice((10, 100)) if len(data) < 20_000 else data


FAULTS: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    *(flip, cut, remove, repeat, insert, insert, other_number, other_number, other_word),
    *(lines_in_another_order, deep, other_encoding, other_json, other_json, large),
)


def damaged_command(rng: random.Random) -> list[str]:
    """A command line with one to three words that nobody would write."""
    words = list(rng.choice(COMMANDS))
    for _ in range(rng.choice((1, 1, 2, 3))):
        place = rng.randrange(1, len(words))
        strange = (
            *NUMBERS,
            *WORDS,
            "",
            "all",
            "x" * 5000,
            "é",
            "../x:y",
            "a.csv",
            "--",
            "-1",
            "nan",
        )
        words[place] = rng.choice((*strange, words[place][::-1], words[place] * 3))
        if rng.random() < 0.1:
            del words[place]
            words.append("1")
    return [word.replace("\0", "") for word in words]


# --- tries ------------------------------------------------------------------------------------


class Try(NamedTuple):
    """One damaged file, and what is done with it."""

    kind: str
    use: Callable[[Path], None]
    data: bytes
    suffix: str


class Outcome(NamedTuple):
    """What came of it: "result", "error", or what should not be."""

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
    start = time.process_time()  # so that what else the machine does is not counted
    try:
        tried.use(path)
        verdict, text = "result", ""
    except sl.StagelineError as error:
        verdict, text = "error", str(error)
    except ValueError as error:
        is_json = tried.use is use_costs and isinstance(error, json.JSONDecodeError | UnicodeError)
        is_ours = is_json or "integer string conversion" in str(error)  # the user's own json.loads
        verdict = "error" if tried.use is use_costs and is_ours else "another exception"
        text = traceback.format_exc(limit=-6)
    except (Exception, RecursionError) as error:
        own = tried.use is use_costs and isinstance(
            error, RecursionError | TypeError | AttributeError
        )
        is_loading = own and "json" in traceback.format_exc() + str(error)
        is_mapping = own and "mapping" in str(error)  # **values of what is no object
        verdict = "error" if is_loading or is_mapping else "another exception"
        text = traceback.format_exc(limit=-6)
    seconds = time.process_time() - start
    if seconds > SECONDS:
        verdict = f"took {seconds:.1f} s"
    return Outcome(tried.kind, verdict, seconds, text[-3000:])


def work(pipe: Connection, seed: int) -> None:
    """In a process of its own: judge the numbers that come, until None does."""
    examples = {name: list(kind.examples()) for name, kind in KINDS.items()}
    from stageline import cli, launch, verification  # noqa: F401, PLC0415  before memory counts

    vars(cli)["app"] = get_command(cli.app)  # which typer would otherwise make anew for each try
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
    """A process and the pipe to it. State: both, renewed when it dies or is too late."""

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
            if self.pipe.poll(PATIENCE):
                outcome: Outcome = self.pipe.recv()
                if outcome.verdict in ("result", "error"):
                    return outcome
                self._end()
                self._start()  # what it has taken is not the next one's
                return outcome
            verdict = f"did not end within {PATIENCE:.0f} s"
        except EOFError:
            self.process.join()
            verdict = f"the process died ({self.process.exitcode})"
        self._end()
        self._start()
        return Outcome("?", verdict, PATIENCE)

    def close(self) -> None:
        self.pipe.send(None)
        self.process.join()

    def _end(self) -> None:
        self.process.kill()
        self.process.join()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tries", type=int, default=105_000)
    parser.add_argument("--first", type=int, default=0, help="The number of the first try.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="One try, with its file and error shown.")
    parser.add_argument("--failures", type=int, default=20, help="Stop after so many.")
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
