"""Bubble rates of the tables of Zero Bubble (arXiv 2401.10241), from the times that it measured.

`tests/figures/zero_bubble_rates.csv` has the rows of tables 5 and 8. In table 8 times are
those of one of two chunks, so a rank's are twice as long; transfers are not.
"""

import csv
from pathlib import Path
from typing import NamedTuple

import pytest

from stageline.costs import Costs
from stageline.schedules.families.interleaved_1f1b import interleaved_1f1b
from stageline.schedules.families.one_f_one_b import one_f_one_b
from stageline.schedules.families.zb_h1 import zb_h1
from stageline.schedules.families.zb_h2 import zb_h2
from stageline.schedules.schedule import Schedule
from stageline.simulation.simulate import simulate

FIGURES = Path(__file__).parents[2] / "figures"
CHUNKS_OF_TABLE_5 = {"1.5B": 3, "6.2B": 4, "14.6B": 3, "28.3B": 2}


class Row(NamedTuple):
    """A row of the paper, with the times of a whole rank."""

    sizes: tuple[int, int]
    forward: float
    input_grad: float
    weight_grad: float
    transfer: float
    num_chunks: int  # of its interleaved 1F1B
    rates: dict[str, float]

    def bubble(self, schedule: Schedule) -> float:
        num_chunks = schedule.num_stages // schedule.num_ranks
        costs = Costs(
            forward=self.forward / num_chunks,
            input_grad=self.input_grad / num_chunks,
            weight_grad=self.weight_grad / num_chunks,
            transfer=self.transfer,
        )
        return simulate(schedule, costs).span_bubble


def read(cells: dict[str, str]) -> Row:
    in_chunks = cells["table"] == "8"
    parts = 2 if in_chunks else 1
    return Row(
        (int(cells["p"]), int(cells["m"])),
        parts * float(cells["F"]),
        parts * float(cells["B"]),
        parts * float(cells["W"]),
        float(cells["c"]),
        2 if in_chunks else CHUNKS_OF_TABLE_5[cells["model"]],
        {name: float(value) for name, value in cells.items() if name.startswith("r_") and value},
    )


with (FIGURES / "zero_bubble_rates.csv").open() as file:
    LINES = list(csv.DictReader(file))
ROWS = [read(cells) for cells in LINES]
rows = pytest.mark.parametrize(
    "row", ROWS, ids=["{table}-{model}-m{m}".format(**cells) for cells in LINES]
)


@rows
def test_1f1b_to_all_four_digits(row: Row) -> None:
    assert round(row.bubble(one_f_one_b(*row.sizes)), 4) == row.rates["r_1f1b"]


@rows
def test_zb_h1_to_all_four_digits(row: Row) -> None:
    assert round(row.bubble(zb_h1(*row.sizes)), 4) == row.rates["r_zb_h1"]


@rows
def test_zb_h2_to_all_four_digits(row: Row) -> None:
    assert round(row.bubble(zb_h2(*row.sizes)), 4) == row.rates["r_zb_h2"]


@rows
def test_interleaved_1f1b_within_half_a_percent(row: Row) -> None:
    schedule = interleaved_1f1b(*row.sizes, chunks_per_rank=row.num_chunks)
    assert row.bubble(schedule) == pytest.approx(row.rates["r_1f1b_i"], abs=0.005)
