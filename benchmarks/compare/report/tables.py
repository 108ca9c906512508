"""Tables of the stored results, for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from statistics import median

from benchmarks.compare.cells import by_hand
from benchmarks.compare.contestants import ours, torch_pipelining
from benchmarks.compare.report.outcome import Runs, host_times, of_kind, over_limit, peaks, speeds
from rich.console import Console
from rich.table import Table

THROUGHPUT = "times the throughput [95 %]"


def print_all(runs: Runs, console: Console) -> None:
    """Print a table for each kind of cell that there is."""
    for title, build in TABLES.items():
        table = build(runs)
        if table.row_count:
            console.print(f"\n{title}", style="bold")
            console.print(table)


def table_of(*columns: str) -> Table:
    """Return an empty table; its first column has names, the others figures."""
    table = Table(box=None, header_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    return table


def speed_table(kind: str) -> Callable[[Runs], Table]:
    """Return a table of throughputs: above 1, Stageline is faster than the peer."""

    def build(runs: Runs) -> Table:
        columns = ("cell", "of", "over", "ms", "peer, ms", THROUGHPUT, "order")
        table = table_of(*columns)
        for each in speeds(runs, kind):
            seconds = (f"{1e3 * t:.1f}" for t in each.seconds)
            row = (each.cell, each.ours, each.peer, *seconds, str(each.ratio), each.order)
            table.add_row(*row)
        return table

    return build


def limit_table(runs: Runs) -> Table:
    """Return what steps take over the limit of the machine plus the bubble of their order."""
    columns = ("over limit + bubble [95 %]", "with the bubble of its measured costs [95 %]")
    table = table_of("cell", "of", *columns)
    for name, run in of_kind(runs, "pipelines"):
        for who in run["times"]:
            ratio = over_limit(run, who) if is_ours_in_same_order(who) else None
            if ratio is not None:
                measured = over_limit(run, who, "measured_bubble_factor")
                table.add_row(name, who, str(ratio), "" if measured is None else str(measured))
    return table


def is_ours_in_same_order(who: str) -> bool:
    """Return whether a contestant runs the order that the cell's bubble is of."""
    return who in (ours.PROCESSES, ours.THREADS)


def host_table(runs: Runs) -> Table:
    """Return the microseconds of an action."""
    found = host_times(runs)
    names = list(dict.fromkeys(name for each in found for name in each.microseconds))
    table = table_of("cell", *(f"{name}, µs [95 %]" for name in names))
    for each in found:
        cells = (
            f"{each.microseconds[name].median:.0f} [{each.microseconds[name].low:.0f}, "
            f"{each.microseconds[name].high:.0f}]"
            for name in names
        )
        table.add_row(each.cell, *cells)
    return table


def memory_table(kind: str, mine: str, peer: str) -> Callable[[Runs], Table]:
    """Return the peaks of ranks, in MB, and the larger one over the larger one."""

    def build(runs: Runs) -> Table:
        table = table_of("cell", f"{mine}, MB by rank", f"{peer}, MB by rank", "by rank", "fullest")
        for each in peaks(runs, kind, mine, peer):
            pairs = [*zip(each.ours, each.peer, strict=True), (max(each.ours), max(each.peer))]
            *ratios, fullest = (f"{a / b:.2f}" if b else "–" for a, b in pairs)
            cells = (megabytes(each.ours), megabytes(each.peer))
            table.add_row(each.cell, *cells, ", ".join(ratios), fullest)
        return table

    return build


def plan_table(runs: Runs) -> Table:
    """Return what was planned, and what its step was expected to take."""
    table = table_of("cell", "memory, MB", "planned", "expected, ms", "measured, ms")
    for name, run in of_kind(runs, "by-hand"):
        taken = median(run["times"][ours.PLANNED])
        figures = (f"{run['cell']['memory'] / 1e6:.0f}", run["chosen"])
        table.add_row(name, *figures, f"{1e3 * run['expected']:.1f}", f"{1e3 * taken:.1f}")
    return table


def megabytes(sizes: Iterable[int]) -> str:
    return ", ".join(f"{size / 1e6:.1f}" for size in sizes)


TABLES: dict[str, Callable[[Runs], Table]] = {
    "Same cut, same schedule": speed_table("pipelines"),
    "Over the machine's limit": limit_table,
    "Host time of an action": host_table,
    "Peak memory": memory_table("memory", ours.PROCESSES, torch_pipelining.TORCH),
    "One rank, and two threads": speed_table("one-rank"),
    "Threads on emulated accelerators": speed_table("emulated"),
    "Fast paths, on over off": speed_table("ablation"),
    "Planned, beside what is done by hand": speed_table("by-hand"),
    "Plans": plan_table,
    "Memory of plans": memory_table("memory by hand", ours.PLANNED, by_hand.BY_HAND),
}
