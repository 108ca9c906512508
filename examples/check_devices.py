"""Check pipelines on the devices of this machine, and write a report that can be sent back.

python examples/check_devices.py                              # a thread for each device
stageline run --num-processes 2 examples/check_devices.py     # a process for each; or torchrun

Every schedule is compared with a plain loop on one device. Links, overlap, steps, waits of the host
and memory are measured, and one rank fails on purpose. Without devices all of it runs on the CPU.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import partial
from itertools import combinations, permutations
from pathlib import Path
from statistics import fmean
from time import perf_counter, strftime
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.padding import Padding
from rich.status import Status
from rich.table import Table
from torch import Tensor, nn
from torch.utils import collect_env

import stageline as sl
from stageline.planning.cluster.device_copies import copy_link, queue_copies
from stageline.planning.cluster.link_probes import open_ways
from stageline.planning.cluster.measure_links import LARGE, link_of, measure_pairs
from stageline.planning.cluster.measure_overlap import MATRIX_SIZE, measure_overlap
from stageline.runtime.accelerators.accelerator import Accelerator
from stageline.runtime.accelerators.measured_devices import cuda_waits, device_name
from stageline.runtime.devices import accelerators_of
from stageline.simulation.median_costs import median_costs, median_timeline
from stageline.training.metrics import peak_memory
from stageline.units import format_bytes
from stageline.zoo.device_training import Batches, DeviceTraining, Sizes

SANITIZER = "TORCH_CUDA_SANITIZER"  # torch looks for this variable when it is imported
ROUNDING = 1e-3  # a difference from the plain loop that may come from the order of additions
VARIABLES = ("NCCL_", "TORCH_", "PYTORCH_", "CUDA_", "CUBLAS_", "HIP_")  # that the report has
PROMPT = 10.0  # seconds in which all ranks have to stop after one has failed
MESSAGES = 20  # at a time, to see whether they overlap with products
TINY, OF_CPU, OF_DEVICE = Sizes(32, 2, 8, 1), Sizes(128, 4, 32, 2), Sizes(1536, 16, 512, 4)
QUICK = ("zbv", "pipedream")


class Verdict(StrEnum):
    """What a check says, the worst last."""

    SKIPPED = "skipped"
    OK = "ok"
    NOTE = "note"
    FAILED = "failed"


COLOURS = {"skipped": "dim", "ok": "green", "note": "yellow", "failed": "bold red"}


@dataclass
class Finding:
    """One line of the report: of one process, or the worst of all."""

    verdict: Verdict
    subject: str
    text: str
    data: dict[str, Any] = field(default_factory=dict)


Findings = Iterator[Finding]
Row = tuple[str, ...]


class World:
    """The ranks, their devices, and what this process knows of the others."""

    def __init__(self, status: Status, *, quick: bool) -> None:
        self.status, self.quick = status, quick
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        self.kind = accelerator.type if accelerator is not None else "cpu"
        count = torch.accelerator.device_count() if accelerator is not None else 0
        self.uses_processes = "RANK" in os.environ
        self.rank, self.num_ranks, self.control = 0, max(2, count), None
        own = range(self.num_ranks)
        if self.uses_processes:
            local = int(os.environ["LOCAL_RANK"])
            own = range(local, local + 1)
            if self.kind != "cpu":
                torch.accelerator.set_device_index(local)  # raises if there are too few
            dist.init_process_group()
            self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
            self.control = dist.new_group(backend="gloo")
        names = [self.kind if not count else f"{self.kind}:{each % count}" for each in own]
        self.places = [torch.device(name) for each in self.gather(names) for name in each]
        devices = None if self.kind == "cpu" else self.places
        # what is measured of devices alone is measured of simulated ones on the CPU
        self.accelerators = accelerators_of(devices or [None] * self.num_ranks, simulated=True)
        backend = "processes" if self.uses_processes else "threads"
        self.training = DeviceTraining(self.num_ranks, devices, backend, self.places[self.rank])

    def accelerator(self, rank: int) -> Accelerator:
        found = self.accelerators[rank]
        assert found is not None
        return found

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes."""
        if self.control is None:
            return [value]
        found: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(found, value, self.control)
        return found

    def synchronize(self) -> None:
        """Wait until the devices of all processes have nothing to do."""
        for rank in self.own_ranks:
            self.accelerator(rank).synchronize()
        self.gather(None)

    @property
    def own_ranks(self) -> Sequence[int]:
        return [self.rank] if self.uses_processes else range(self.num_ranks)

    @property
    def own_places(self) -> list[torch.device]:
        return [self.places[rank] for rank in self.own_ranks]


def parity(world: World, **options: Any) -> Findings:
    """Train with each schedule, and compare the weights with those of a plain loop."""
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    try:
        for name in QUICK if world.quick else sl.schedule_names():
            world.status.update(f"{name}: in a pipeline and in a plain loop")
            found = world.training.compare(TINY, name, **options)
            verdict, text = Verdict.OK, "same bits"
            if found.difference != 0.0:
                is_rounding = found.of_itself > 0.0 and found.difference < ROUNDING
                verdict = Verdict.NOTE if is_rounding else Verdict.FAILED
                text = f"differs by {found.difference:.1e} from the plain loop, "
                text += f"which differs by {found.of_itself:.1e} from itself"
            yield Finding(verdict, name, text, found._asdict())
    finally:
        torch.use_deterministic_algorithms(mode=False)


def links(world: World) -> Findings:
    """Measure messages between each pair of ranks."""
    world.status.update("messages between each pair of ranks")
    ranks = range(world.num_ranks)
    found: dict[str, sl.Link] = {}
    if world.control is not None:
        own = None if world.kind == "cpu" else world.accelerator(world.rank)
        seconds = measure_pairs([*combinations(ranks, 2)], own, world.control)
        found = {f"ranks {a} and {b}": link_of(each) for (a, b), each in seconds.items()}
    else:
        apart = ((a, b) for a, b in permutations(ranks, 2) if _are_apart(world, a, b))
        for a, b in apart:
            link = copy_link(world.accelerator(a), world.accelerator(b))
            found[f"rank {a} to rank {b}"] = link
    is_simulated = world.kind == "cpu" and world.control is None
    for subject, link in found.items():
        text = f"{1e6 * link.latency:,.1f} µs and {link.bandwidth / 1e9:,.2f} GB/s"
        text += ", copied by simulated devices" if is_simulated else ""
        yield Finding(Verdict.OK, subject, text, asdict(link))


def overlap(world: World) -> Findings:
    """Time products of matrices and messages, one after the other and beside each other."""
    world.status.update("messages beside products of matrices")
    pair, own = (0, 1), world.accelerator(world.rank)
    if world.control is not None:
        with open_ways([pair], own, world.control) as ways:
            is_end = world.rank in pair
            trips = partial(ways.round_trips, LARGE, world.rank, pair, MESSAGES)
            yield _overlap(world, own, trips if is_end else list[float])
    elif _are_apart(world, *pair):
        other = world.accelerator(pair[1])
        yield _overlap(world, own, lambda: queue_copies(own, other, LARGE))


def _overlap(world: World, own: Accelerator, messages: Callable[[], object]) -> Finding:
    is_simulated = world.kind == "cpu"
    most, size = lambda count: max(world.gather(count)), 512 if is_simulated else MATRIX_SIZE
    found = measure_overlap(own, messages, world.synchronize, most, size)
    text = f"{100 * max(0.0, found.hidden):.0f} % of the shorter one is hidden behind the other"
    verdict = Verdict.OK if found.hidden > 0.5 else Verdict.NOTE
    if is_simulated:
        verdict, text = Verdict.SKIPPED, "a simulated device does one thing at a time"
    return Finding(verdict, "ranks 0 and 1", text, {**found._asdict(), "hidden": found.hidden})


def _are_apart(world: World, one: int, other: int) -> bool:
    return world.accelerators[one] is not world.accelerators[other]


def steps(world: World) -> Findings:
    """Time steps of a larger model, and compare them with the ideal of the schedule."""
    sizes = TINY if world.quick else OF_CPU if world.kind == "cpu" else OF_DEVICE
    data = world.training.batches(sizes, 2 if world.quick else 10)
    for name in ("1f1b", "zbv") if world.quick else ("1f1b", "zb_h1", "zbv"):
        world.status.update(f"{name}: {len(data)} steps")
        if world.kind != "cpu":
            for place in world.own_places:
                torch.accelerator.reset_peak_memory_stats(place)
        with world.training.pipeline(sizes, name) as pipe:
            _seconds_of(world, pipe, data[:2])
            seconds = _seconds_of(world, pipe, data) / len(data)
            measured = [_traced(pipe, data) for _ in range(3)]
            schedule = pipe.schedule
        own = dict.fromkeys(world.own_places)
        peaks = [each for row in world.gather([peak_memory({p}) for p in own]) for each in row]
        yield _step_time(schedule, seconds, measured, peaks)


def _seconds_of(world: World, pipe: sl.Pipeline, data: Batches) -> float:
    """Return the seconds that mini-batches take which follow each other without a barrier."""
    world.synchronize()
    start = perf_counter()
    for _ in pipe.run(data):
        pass
    world.synchronize()
    return perf_counter() - start


def _traced(pipe: sl.Pipeline, data: Batches) -> sl.Timeline:
    with pipe.trace() as trace:
        pipe.step(*data[0])
    return trace.timeline


def _step_time(
    schedule: sl.Schedule, seconds: float, steps: Sequence[sl.Timeline], peaks: Sequence[int]
) -> Finding:
    """Compare a step with a simulation in which messages and the host take no time."""
    step, ideal = median_timeline(steps), sl.simulate(schedule, median_costs(steps)).makespan
    idle = {
        part: fmean(getattr(each, part) for each in step.idle) / step.makespan
        for part in ("bubble", "imbalance", "transfer", "host")
    }
    times = {"seconds": seconds, "alone": step.makespan / 1e3, "ideal": ideal / 1e3}
    lines = (
        f"{1e3 * seconds:.1f} ms in a stream, {step.makespan:.1f} ms alone, {ideal:.1f} ms ideal",
        f"idle: {', '.join(f'{part} {100 * share:.0f} %' for part, share in idle.items())}",
        f"peak memory by device or process: {', '.join(map(format_bytes, peaks))}",
    )
    data = {**times, **idle, "peak_memory": peaks}
    return Finding(Verdict.OK, schedule.name, "\n".join(lines), data)


def waits(world: World) -> Findings:
    """Count how often the host waits for a device within a step."""
    world.status.update("a step, in which the host should not wait")
    (batch,) = world.training.batches(TINY, 1)
    with world.training.pipeline(TINY, "1f1b", check_streams=world.kind == "cpu") as pipe:
        for _ in range(2):
            pipe.step(*batch)
        world.synchronize()
        places = cuda_waits(lambda: pipe.step(*batch))
    verdict, text = Verdict.OK, "none"
    if places is None and world.kind == "cpu":
        text = "none in Stageline's own code, as simulated devices would refuse it"
    elif places is None:
        verdict, text = Verdict.SKIPPED, "torch sees them on CUDA only"
    elif places:
        verdict, text = Verdict.FAILED, f"{len(places)}, the first at {places[0]}"
    yield Finding(verdict, "in a step", text, {"places": places})


class Fails(nn.Module):
    """A layer that raises once it is told to."""

    is_told = False

    def forward(self, x: Tensor) -> Tensor:
        if self.is_told:
            raise ArithmeticError("this layer fails on purpose")
        return x * 1.0


def failure(world: World) -> Findings:
    """Let the last rank raise, and see when and how each rank hears of it."""
    world.status.update("the last rank fails")
    training, last = world.training, Fails()
    x = torch.ones(training.num_microbatches, 4)
    layers = [nn.Linear(4, 4) for _ in range(world.num_ranks - 1)]
    with sl.Pipeline(
        nn.Sequential(*layers, last),
        nn.functional.mse_loss,
        num_ranks=world.num_ranks,
        num_microbatches=training.num_microbatches,
        balance=[1] * world.num_ranks,
        devices=training.devices,
        backend=training.backend,
    ) as pipe:
        pipe.step(x, x)
        last.is_told = True
        start, error = perf_counter(), "no error"
        try:
            float(pipe.step(x, x).loss)
        except sl.StageError as raised:
            error = str(raised)
        seconds = perf_counter() - start
    is_prompt = seconds < PROMPT and "fails on purpose" in error
    text = f"every rank says why, the last one after {max(world.gather(seconds)):.1f} s"
    if not is_prompt:
        text = f"after {seconds:.1f} s: {error.splitlines()[0]}"
    numbers = {"seconds": seconds, "error": error}
    yield Finding(Verdict.OK if is_prompt else Verdict.FAILED, "a layer raises", text, numbers)


def checks_of(world: World) -> dict[str, Callable[[World], Findings]]:
    """Return the checks by their titles, in order."""
    title = "Weights compared with those of a plain loop"
    if SANITIZER in os.environ:
        return {f"{title}, under torch's CUDA sanitizer": parity}
    checked = {f"{title}, streams simulated and checked": partial(parity, check_streams=True)}
    return {
        title: parity,
        **(checked if world.kind == "cpu" else {}),
        "Messages between ranks": links,
        "Overlap of messages and work": overlap,
        "Steps of a larger model": steps,
        "Waits of the host for a device": waits,
        "Failure of a rank": failure,  # the last: it closes connections
    }


def carried_out(world: World, check: Callable[[World], Findings]) -> list[Finding]:
    """Carry out a check; what it raises is a finding too."""
    found: list[Finding] = []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of operators that are not deterministic
            found.extend(check(world))
    except Exception as error:
        lines = f"{type(error).__name__}: {error}".splitlines()
        data = {"traceback": traceback.format_exc()}
        found.append(Finding(Verdict.FAILED, "stopped by an error", lines[0], data))
    return found


def merged(everyone: Sequence[Sequence[Finding]]) -> list[Finding]:
    """Return the worst finding of each subject, with what all processes measured."""
    if len(everyone) == 1:
        return [*everyone[0]]
    by_subject: dict[str, dict[int, Finding]] = {}
    for rank, row in enumerate(everyone):
        for each in row:
            by_subject.setdefault(each.subject, {})[rank] = each
    order, found = [*Verdict], []
    for subject, by_rank in by_subject.items():
        rank = max(by_rank, key=lambda each: order.index(by_rank[each].verdict))
        worst = by_rank[rank]
        is_good = worst.verdict in (Verdict.OK, Verdict.SKIPPED)
        text = worst.text if is_good else f"rank {rank}: {worst.text}"
        data = {f"rank {each}": one.data for each, one in by_rank.items()}
        found.append(Finding(worst.verdict, subject, text, data))
    return found


def environment(world: World) -> dict[str, Any]:
    """Return what is known of this process's machine, torch and devices."""
    has_device, is_cuda = world.kind != "cpu", world.kind == "cuda"
    pairs = permutations(range(torch.cuda.device_count()), 2) if is_cuda else ()
    return {
        "stageline": sl.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "CUDA": torch.version.cuda if is_cuda else None,
        "HIP": torch.version.hip if is_cuda else None,
        "driver": _driver() if is_cuda else None,
        "NCCL": _nccl() if is_cuda and dist.is_nccl_available() else None,
        "without peer access": [
            f"{a} to {b}" for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)
        ],
        "host": platform.node(),
        "cores": os.cpu_count(),
        "ranks": {
            rank: {
                "kind": "process" if world.uses_processes else "thread",
                "device": str(place),
                "name": device_name(place) if has_device else platform.machine(),
                "memory": torch.accelerator.get_memory_info(place)[1] if has_device else None,
            }
            for rank, place in zip(world.own_ranks, world.own_places, strict=True)
        },
        "variables": {n: v for n, v in os.environ.items() if n.startswith(VARIABLES)},
    }


def _driver() -> str | None:
    found: str | None = collect_env.get_nvidia_driver_version(collect_env.run)  # type: ignore[no-untyped-call]
    return found


def _nccl() -> str:
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def environment_rows(everyone: Sequence[dict[str, Any]]) -> Iterator[Row]:
    """Yield the lines of the first process's software, and of everyone's devices."""
    for name in ("stageline", "torch", "python", "system", "CUDA", "HIP", "driver", "NCCL"):
        if everyone[0][name]:
            yield name, everyone[0][name]
    if pairs := everyone[0]["without peer access"]:
        yield "no peer access", ", ".join(pairs)
    for each in everyone:
        for rank, own in each["ranks"].items():
            memory = f", {format_bytes(own['memory'])}" if own["memory"] else ""
            yield (
                f"rank {rank}",
                f"{own['kind']}, {own['device']} on {each['host']} ({own['name']}{memory})",
            )


def finding_row(found: Finding) -> Row:
    return found.subject, f"[{COLOURS[found.verdict]}]{found.verdict}", found.text


def show(console: Console, title: str, rows: Iterable[Row]) -> None:
    """Print a heading and a table."""
    table = Table.grid(padding=(0, 2))
    for row in rows:
        table.add_row(*row)
    console.print(f"\n[bold]{title}[/]")
    console.print(Padding(table, (0, 2)))


def conclude(console: Console, found: Sequence[Finding], report: Path) -> None:
    """Print the verdict."""
    counts = Counter(each.verdict for each in found)
    numbers = ", ".join(f"{counts[each]} {each}" for each in reversed(Verdict) if counts[each])
    verdict = "[bold green]No check failed"
    if counts[Verdict.FAILED]:
        verdict = "[bold red]Something is wrong here"
    console.print(f"\n{verdict}[/]: {numbers}.\nThe report to send back is {report}.")


def main(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer schedules, smaller sizes.")] = False,
    sanitizer: Annotated[
        bool,
        typer.Option("--sanitizer", help="Parity alone, under torch's CUDA sanitizer."),
    ] = False,
    report: Annotated[Path, typer.Option(help="File to write.")] = Path(
        "check_devices_report.json"
    ),
) -> None:
    """Check pipelines on all devices of this machine, and write a report to send back."""
    if sanitizer and not ("RANK" in os.environ and torch.cuda.is_available()):
        raise typer.BadParameter("torch's sanitizer needs CUDA, and processes instead of threads")
    if sanitizer and SANITIZER not in os.environ:
        os.environ[SANITIZER] = "1"
        os.execv(sys.executable, sys.orig_argv)  # begin again, with the variable
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else products may differ
    torch.set_num_threads(1)
    is_first = os.environ.get("RANK", "0") == "0"
    console = Console(quiet=not is_first, highlight=False)
    results: dict[str, Any] = {"started": strftime("%Y-%m-%d %H:%M:%S"), "quick": quick}
    found: list[Finding] = []
    try:
        with console.status("connecting") as status:
            world = World(status, quick=quick)
            results["environment"] = world.gather(environment(world))
            show(console, "Environment", environment_rows(results["environment"]))
            results["checks"] = {}
            for title, check in checks_of(world).items():
                each = merged(world.gather(carried_out(world, check)))
                show(console, title, map(finding_row, each))
                results["checks"][title] = [asdict(finding) for finding in each]
                found += each
    finally:  # also if a check has ended a process
        if is_first:
            report.write_text(json.dumps(results, indent=1) + "\n")
    conclude(console, found, report)
    if world.uses_processes:
        with suppress(Exception):  # the rank that failed may have closed it
            dist.destroy_process_group()
    raise typer.Exit(int(any(each.verdict is Verdict.FAILED for each in found)))


if __name__ == "__main__":
    typer.run(main)
