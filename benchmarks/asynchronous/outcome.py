"""What a training was set to and what came of it, which rates are best, and the table of all."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from rich.table import Table

BASELINE = "1f1b"
LAST = 0.1  # the part of a training whose losses say how good a rate is
DIVERGED = "diverged"


@dataclass(frozen=True)
class Way:
    """How a mini-batch of m micro-batches becomes an update."""

    num_microbatches: int
    name: str
    schedule: str
    vertical_sync: bool | None = None


WAYS = (
    Way(1, "1f1b", "1f1b"),
    Way(1, "pipedream", "pipedream"),
    Way(1, "vertical sync", "pipedream", vertical_sync=True),
    Way(4, "1f1b", "1f1b"),
    Way(4, "pipedream", "pipedream"),
    Way(4, "vertical sync", "pipedream", vertical_sync=True),
    Way(4, "2BW", "pipedream_2bw"),
)


@dataclass(frozen=True)
class Setting:
    """All that tells one training from another."""

    way: Way
    optimizer: str
    rate: float
    seed: int


@dataclass(frozen=True)
class Outcome:
    """The losses of all updates, and that of passages it has not seen, at the end."""

    setting: Setting
    losses: list[float]
    held_out: float
    skipped: int  # updates that a stage left out, as its gradients were not finite
    warned: str  # by the guard; "" if not

    @property
    def has_diverged(self) -> bool:
        """Not finite, or no better at the end than at the beginning."""
        finite = all(map(math.isfinite, [*self.losses, self.held_out]))
        return not finite or self.skipped > 0 or self.held_out >= self.losses[0]

    @property
    def last(self) -> float:
        """The mean training loss at the end; infinite if it has diverged."""
        length = max(1, int(LAST * len(self.losses)))
        return math.inf if self.has_diverged else fmean(self.losses[-length:])


Rates = dict[tuple[str, Way], float]  # by optimizer and way


def best_rates(outcomes: Iterable[Outcome]) -> Rates:
    """Those with the least training loss at the end, on the first seed."""
    tried: dict[tuple[str, Way], list[Outcome]] = {}
    for outcome in outcomes:
        if outcome.setting.seed == 0:
            key = outcome.setting.optimizer, outcome.setting.way
            tried.setdefault(key, []).append(outcome)
    return {
        key: min(found, key=lambda outcome: outcome.last).setting.rate
        for key, found in tried.items()
    }


def shared_rate(best: Rates, optimizer: str, way: Way) -> float:
    """The best one of 1f1b with as many micro-batches."""
    return next(
        rate
        for (name, other), rate in best.items()
        if (name, other.name, other.num_microbatches) == (optimizer, BASELINE, way.num_microbatches)
    )


def over_seeds(outcomes: Iterable[Outcome], optimizer: str, way: Way, rate: float) -> list[Outcome]:
    """In the order of their seeds."""
    wanted = optimizer, way, rate
    found = [o for o in outcomes if (o.setting.optimizer, o.setting.way, o.setting.rate) == wanted]
    return sorted(found, key=lambda outcome: outcome.setting.seed)


def table(outcomes: Sequence[Outcome], optimizer: str, delays: dict[Way, str]) -> Table:
    """Held-out losses: of the first seed at every rate, of all seeds at two of them."""
    best = best_rates(outcomes)
    rates = sorted({o.setting.rate for o in outcomes if o.setting.optimizer == optimizer})
    shown = Table(box=None, header_style="bold")
    for column in (optimizer, "m", "delay by stage", *(f"at {rate:g}" for rate in rates)):
        shown.add_column(column, justify="left" if column == optimizer else "right")
    for column in ("at 1f1b's", "±", "best rate", "loss", "±"):
        shown.add_column(column, justify="right")
    for way in (way for name, way in best if name == optimizer):
        first = (over_seeds(outcomes, optimizer, way, rate)[:1] for rate in rates)
        own = best[optimizer, way]
        same = over_seeds(outcomes, optimizer, way, shared_rate(best, optimizer, way))
        shown.add_row(
            way.name,
            str(way.num_microbatches),
            delays[way],
            *(_held_out(found)[0] for found in first),
            *_held_out(same),
            f"{own:g}",
            *_held_out(over_seeds(outcomes, optimizer, way, own)),
        )
    return shown


def _held_out(found: Sequence[Outcome]) -> tuple[str, str]:
    """The mean, with a mark if the guard warned, and half of what lies between the extremes."""
    lost = sum(outcome.has_diverged for outcome in found)
    if lost:
        return (DIVERGED if lost == len(found) else f"{lost} of {len(found)} {DIVERGED}"), ""
    losses = [outcome.held_out for outcome in found]
    mark = "!" if any(outcome.warned for outcome in found) else ""
    return f"{fmean(losses):.3f}{mark}", f"{(max(losses) - min(losses)) / 2:.3f}"


def save(path: Path, outcomes: Iterable[Outcome]) -> None:
    """A line for each; what is not finite is null."""
    lines = []
    for outcome in outcomes:
        record = asdict(outcome)
        record["losses"] = [_number(loss) for loss in outcome.losses]
        record["held_out"] = _number(outcome.held_out)
        lines.append(json.dumps(record))
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


def load(path: Path) -> list[Outcome]:
    outcomes = []
    for record in json.loads(path.read_text(encoding="utf-8")):
        setting = record.pop("setting")
        way = Way(**setting.pop("way"))
        record["losses"] = [math.nan if loss is None else loss for loss in record["losses"]]
        record["held_out"] = math.nan if record["held_out"] is None else record["held_out"]
        outcomes.append(Outcome(setting=Setting(way, **setting), **record))
    return outcomes


def _number(loss: float) -> float | None:
    return round(loss, 4) if math.isfinite(loss) else None
