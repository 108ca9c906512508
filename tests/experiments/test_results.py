"""Results that several processes write."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from experiments.results import Results

NUM_RUNS = 20


def make_runs(path: Path, first: int) -> None:
    for number in range(first, first + NUM_RUNS):
        Results(path).run_once(f"run {number}", lambda: {"loss": 1.0}, seed=number)


def test_parts_of_an_experiment_that_run_side_by_side_lose_no_result(tmp_path: Path) -> None:
    path = tmp_path / "new" / "results.json"
    with ProcessPoolExecutor(2, get_context("fork")) as pool:
        for done in [pool.submit(make_runs, path, first) for first in (0, NUM_RUNS)]:
            done.result(timeout=60)
    found = Results(path).read()
    assert {run["seed"] for run in found.values()} == set(range(2 * NUM_RUNS))
