"""GPipe's table 1 (arXiv 1811.06965): the largest model that fits, from shapes alone.

python benchmarks/gpipe_table1.py [PAPER.json]     prints both tables, about three minutes

naive-1       one device, the whole mini-batch at once, everything kept for the backward
accumulated-1 one device, micro-batches, everything kept: not in the paper
pipeline-K    K devices, micro-batches, GPipe's order, every stage recomputed from what it reads
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import pairwise
from operator import mul
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch.nn.functional import cross_entropy

import stageline as sl
from stageline.planning.cluster.cluster import Cluster
from stageline.planning.partition.rank_devices import RankDevices
from stageline.planning.partition.stage_costs import StageCut, num_optimizer_states, stage_costs
from stageline.planning.profiling.profile_result import Measurement, Profile
from stageline.planning.profiling.repeat_layers import repeat_layers
from stageline.zoo import gpt
from stageline.zoo.amoebanet import amoebanet_d
from stageline.zoo.transformer import transformer as layers_of_transformer

PAPER = Path(__file__).parents[1] / "tests" / "figures" / "gpipe_tables.json"
OPTIMIZER = "momentum"  # float32 parameter, gradient and one state: the table's 12 bytes
GB = 1e9  # of a device's GiB, that leaves 7 % for what is not counted
RATES: dict[str, Any] = {"flops": 1e13, "bandwidth": 6e11}  # only bytes matter here
SCHEDULES = ("gpipe", "1f1b")
DEPTHS = (18, 36, 72)  # of AmoebaNet, as in the table
WIDTHS = (64, 128, 256)  # from which bytes for others follow
SHALLOW = 15  # cells: five of each size, the third of which may be repeated

ASSUMED = """\
GB: on the fullest device; parameters with gradients and one state of the optimizer (12 bytes each),
    and BatchNorm's statistics + activations. Not counted: inputs, and what an operator needs for a
    moment. The paper's are means over devices, and its 11.7 GB of naive-1 look wrong.
naive-1 runs the whole mini-batch at once and keeps all; accumulated-1, not in the paper, keeps all
of a micro-batch; pipeline-K recomputes every stage. Cuts: the fullest rank holds the least."""


class Size(NamedTuple):
    """Of a model."""

    num_layers: int
    num_filters: int = 0


@dataclass(frozen=True)
class Family:
    """Models to choose from, and what they are trained on."""

    title: str
    memory: float  # bytes of a device
    batch: int
    num_microbatches: int
    ranks: tuple[int, ...]
    profile: Callable[[Size], Profile]
    largest: Callable[[Callable[[Size], bool], int], None]  # asks until it is known which one

    @property
    def samples(self) -> int:
        """Of a micro-batch."""
        return math.ceil(self.batch / self.num_microbatches)


@dataclass(frozen=True)
class Run:
    """A row of the table."""

    name: str
    num_ranks: int
    num_microbatches: int
    samples: int
    recompute: bool


@dataclass(frozen=True)
class Found:
    """The largest model, in bytes by rank."""

    size: Size
    num_parameters: float
    static: Sequence[float]
    peaks: Sequence[float]

    @property
    def fullest(self) -> tuple[float, float]:
        """Bytes of parameters with what belongs to them, and of activations."""
        rank = max(range(len(self.peaks)), key=lambda each: self.peaks[each])
        return self.static[rank], self.peaks[rank] - self.static[rank]


def runs_of(family: Family) -> list[Run]:
    many = family.num_microbatches, family.samples
    return [
        Run("naive-1", 1, 1, family.batch, recompute=False),
        Run("accumulated-1", 1, *many, recompute=False),
        *(Run(f"pipeline-{ranks}", ranks, *many, recompute=True) for ranks in family.ranks),
    ]


def found(family: Family, run: Run, schedule: str) -> Found | None:
    """The largest that fits, with the cut whose fullest rank holds the least."""
    fitting: dict[Size, Found] = {}

    def fits(size: Size) -> bool:
        filled = filled_by(size, family, run, schedule)
        if filled is not None:
            fitting[size] = filled
        return filled is not None

    family.largest(fits, run.num_ranks)
    return max(fitting.values(), key=lambda each: each.num_parameters, default=None)


def filled_by(size: Size, family: Family, run: Run, schedule: str) -> Found | None:
    """None if it does not fit."""
    profile = family.profile(size)
    measurement = with_statistics(profile.at(run.samples), run.num_microbatches)
    under_way = [
        run.num_microbatches if schedule == "gpipe" else min(run.num_microbatches, ranks_behind)
        for ranks_behind in range(run.num_ranks, 0, -1)
    ]
    balance = leanest(measurement, under_way, family.memory)
    if balance is None:
        return None
    placement = tuple(range(run.num_ranks))
    cut = StageCut(balance, placement, (run.recompute,) * run.num_ranks)
    cluster = Cluster(num_devices=run.num_ranks, memory=family.memory)
    machines = RankDevices.of_pipelines(cluster, run.num_ranks, replicas=1)
    costs = stage_costs(
        measurement, profile.tied, cut, machines, in_halves=False, optimizer=OPTIMIZER
    )
    order = sl.build_schedule(
        schedule, num_ranks=run.num_ranks, num_microbatches=run.num_microbatches
    )
    peaks = sl.simulate(order, costs).peak_memory
    num_parameters = sum(layer.parameters for layer in measurement.layers) / 4
    filled = Found(size, num_parameters, costs.static(placement), peaks)
    return filled if max(peaks) <= family.memory else None


def with_statistics(measurement: Measurement, num_microbatches: int) -> Measurement:
    """Beside buffers what the runtime holds until the end of a step for moving averages.

    All buffers here are BatchNorm's, and it sees mean and squares in double for each micro-batch.
    """
    share = 1 + 2 * num_microbatches
    layers = (replace(layer, buffers=share * layer.buffers) for layer in measurement.layers)
    return replace(measurement, layers=tuple(layers))


def leanest(
    measurement: Measurement, under_way: Sequence[int], memory: float
) -> tuple[int, ...] | None:
    """The cut whose fullest stage holds the least, all stages recomputed; None if that is too much.

    A stage holds its layers' bytes once, and what it reads for each micro-batch under way. What it
    reads depends on where it starts and not on where it ends, as layers read from just before them.
    """
    copies = 2 + num_optimizer_states(OPTIMIZER)
    sizes = [la.activation + copies * la.parameters + la.buffers for la in measurement.layers]
    total = np.cumsum([0.0, *sizes])
    read, unsaved = np.zeros_like(total), np.zeros_like(total)  # of a cut in front of a layer
    for value in measurement.values:
        if value.writer >= 0:
            crossed = slice(value.writer + 1, max(value.readers) + 1)
            read[crossed] += value.size
            unsaved[crossed] += value.unsaved
    count = len(sizes)
    least = np.where(np.arange(count + 1) == 0, 0.0, np.inf)
    starts = []
    for number in under_way:
        reached, start = np.full(count + 1, np.inf), np.zeros(count + 1, dtype=np.int64)
        for length in range(1, count + 1):
            layers = total[length:] - total[:-length]
            if layers.min() > memory:
                break
            held = layers + number * read[:-length] + unsaved[length:]
            most = np.maximum(least[:-length], held)
            better = most < reached[length:]
            reached[length:][better] = most[better]
            start[length:][better] = np.flatnonzero(better)
        least = reached
        starts.append(start)
    if least[-1] > memory:
        return None
    ends = [count]
    for start in reversed(starts):
        ends.append(int(start[ends[-1]]))
    return tuple(stop - first for first, stop in pairwise(reversed(ends)))


def largest_number(fits: Callable[[int], bool], fewest: int = 1) -> None:
    """Asks until it is known; what fits, fits with fewer."""
    low, high = fewest - 1, fewest
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)


def deepest(fits: Callable[[Size], bool], num_ranks: int) -> None:
    """A layer for each rank at least."""
    largest_number(lambda number: fits(Size(number)), num_ranks)


def widest(fits: Callable[[Size], bool], _: int) -> None:
    """Of each depth; widths are multiples of 16, as those of the table."""
    for depth in DEPTHS:
        largest_number(lambda number: fits(Size(depth, 16 * number)))  # noqa: B023  used up here


def transformers(sizes: Sequence[int]) -> Callable[[Size], Profile]:
    with torch.device("meta"):
        layers = layers_of_transformer(num_layers=1)
        tokens = torch.empty(1, 1024, dtype=torch.long)
    estimated = sl.estimate(layers, tokens, **RATES, loss_fn=gpt.loss, target=tokens, sizes=sizes)
    shallow = kept_only(estimated)
    return lambda size: repeat_layers(shallow, (1, size.num_layers, 1))


def amoebanets(sizes: Sequence[int], advance: Callable[[], None]) -> Callable[[Size], Profile]:
    """Of any width, from three: what layers hold is a quadratic function of it."""
    shallow = []
    for width in WIDTHS:
        with torch.device("meta"):
            layers = amoebanet_d(num_layers=SHALLOW, num_filters=width)
            images, classes = torch.empty(1, 3, 224, 224), torch.empty(1, dtype=torch.long)
        estimated = sl.estimate(
            layers, images, **RATES, loss_fn=cross_entropy, target=classes, sizes=sizes
        )
        shallow.append(kept_only(estimated))
        advance()
    wide = cache(lambda width: of_width(width, shallow))
    return lambda size: repeat_layers(
        wide(size.num_filters), cells(shallow[0].names, size.num_layers)
    )


def cells(names: Sequence[str], num_layers: int) -> list[int]:
    """How often each comes: of five of a size, the third is like all that would follow it."""
    each = SHALLOW // 3
    again = {f"normal.{each * third + 2}" for third in range(3)}
    return [num_layers // 3 - each + 1 if name in again else 1 for name in names]


def kept_only(profile: Profile) -> Profile:
    """Without what is needed for a moment: the paper does not count it, and it is no polynomial."""
    measurements = (
        replace(each, layers=tuple(replace(layer, momentary=0.0) for layer in each.layers))
        for each in profile.measurements
    )
    return replace(profile, measurements=tuple(measurements))


def of_width(width: int, profiles: Sequence[Profile]) -> Profile:
    """Through three points; weights have two factors that grow with the width, the rest one."""
    shares = [
        math.prod((width - other) / (here - other) for other in WIDTHS if other != here)
        for here in WIDTHS
    ]

    def through(parts: Sequence[Any]) -> Any:
        numbers = {
            field.name: round(sum(map(mul, shares, (getattr(part, field.name) for part in parts))))
            for field in fields(parts[0])
            if isinstance(getattr(parts[0], field.name), float)
        }
        return replace(parts[0], **numbers)

    first = profiles[0]
    measurements = []
    for alike in zip(*(profile.measurements for profile in profiles), strict=True):
        layers = zip(*(each.layers for each in alike), strict=True)
        values = zip(*(each.values for each in alike), strict=True)
        measurements.append(
            replace(
                alike[0], layers=tuple(map(through, layers)), values=tuple(map(through, values))
            )
        )
    return replace(first, measurements=tuple(measurements))


def shown(family: Family, paper: Sequence[Mapping[str, Any]], advance: Callable[[], None]) -> Table:
    table = Table(title=family.title, box=None, title_justify="left")
    own = [c for schedule in SCHEDULES for c in (schedule, "parameters", "GB", "× naive")]
    for column in ("", *own, "paper", "parameters", "GB", "× naive", "ours / paper"):
        table.add_column(column, justify="right")
    rows = {row["run"]: row for row in paper}
    naive: dict[str, float] = {}
    for run in runs_of(family):
        cells, counts = [], []
        for schedule in SCHEDULES:
            largest = found(family, run, schedule)
            advance()
            counts.append(largest.num_parameters if largest else 0.0)
            naive.setdefault(schedule, counts[-1])
            cells += _own(largest, naive[schedule])
        cells += _published(rows.get(run.name), rows["naive-1"], run, counts[0])
        table.add_row(run.name, *cells)
    return table


def _own(largest: Found | None, naive: float) -> list[str]:
    if largest is None:
        return ["none fits", "", "", ""]
    count = largest.num_parameters
    return [_size(*largest.size), _count(count), _used(*largest.fullest), f"{count / naive:.1f}"]


def _published(
    row: Mapping[str, Any] | None, naive: Mapping[str, Any], run: Run, ours: float
) -> list[str]:
    """Its bytes are the sum of all devices; shown is the mean."""
    if row is None:
        return []
    used = (GB * row[name] / run.num_ranks for name in ("param_gb", "activation_gb"))
    count = row["params"]
    ratios = f"{count / naive['params']:.1f}", f"{ours / count:.2f}"
    return [_size(row["L"], row.get("D", 0)), _count(count), _used(*used), *ratios]


def _used(parameters: float, activations: float) -> str:
    return f"{parameters / GB:.2f} + {activations / GB:.2f}"


def _size(num_layers: int, num_filters: int) -> str:
    return f"{num_layers}, {num_filters}" if num_filters else f"{num_layers}"


def _count(number: float) -> str:
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.1f} M"


def main(
    paper: Annotated[Path, typer.Argument(help="The paper's table, as JSON.")] = PAPER,
    amoebanet: Annotated[int, typer.Option(help="Micro-batches of AmoebaNet's 128.")] = 128,
    transformer: Annotated[int, typer.Option(help="Micro-batches of the Transformer's 32.")] = 32,
) -> None:
    """Find the largest models that fit, and print them beside the paper's."""
    rows = json.loads(paper.read_text())
    tables = []
    with Progress(transient=True) as progress:
        shapes = progress.add_task("running shapes", total=1 + len(WIDTHS))
        tried = progress.add_task("looking for the largest", total=None)
        wide = amoebanets(sorted({128 // amoebanet, 128}), lambda: progress.advance(shapes))
        deep = transformers(sorted({32 // transformer, 32}))
        families = {
            "table1_amoebanet_d_8gb": Family(
                f"AmoebaNet-D (L, D), 8 GB, 128 images of 224×224 in {amoebanet} micro-batches",
                8 * GB,
                128,
                amoebanet,
                (1, 2, 4, 8),
                wide,
                widest,
            ),
            "table1_transformer_16gb": Family(
                f"Transformer (L), 16 GB, 32 sequences of 1024 in {transformer} micro-batches",
                16 * GB,
                32,
                transformer,
                (1, 8, 32, 128),
                deep,
                deepest,
            ),
        }
        for key, family in families.items():
            tables.append(shown(family, rows[key], lambda: progress.advance(tried)))
    console = Console(width=170)
    for table in tables:
        console.print(table)
    console.print(ASSUMED)


if __name__ == "__main__":
    typer.run(main)
