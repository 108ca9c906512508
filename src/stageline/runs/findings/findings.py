"""List what would make a run faster."""

from __future__ import annotations

from stageline.runs.findings.causes import (
    another_schedule,
    few_microbatches,
    slow_messages,
    slow_rank,
    uneven_stages,
    varying_times,
    waiting_for_checkpoints,
    waiting_for_data,
)
from stageline.runs.findings.finding import LEAST_GAIN, Finding
from stageline.runs.findings.measured_step import MeasuredStep
from stageline.runs.run import Run

CAUSES = (
    uneven_stages,
    slow_rank,
    few_microbatches,
    another_schedule,
    slow_messages,
    varying_times,
    waiting_for_checkpoints,
    waiting_for_data,
)


def findings(run: Run) -> list[Finding]:
    """Return what would make a run faster, from its recorded steps, the greatest gain first.

    Gains are simulated one by one, with the measured times: they do not add up. A gain of less
    than `LEAST_GAIN` percent is left out, because medians of a few steps vary by as much.
    """
    step = MeasuredStep.of(run)
    if step is None:
        return []
    if run.configuration.backend == "serial":
        return [SERIAL]
    found = [finding for find in CAUSES for finding in find(step)]
    worth = [each for each in found if each.gain is not None and each.gain >= LEAST_GAIN]
    ordered = sorted(worth, key=lambda finding: -(finding.gain or 0.0))
    return [*_shared_cores(run), *ordered]


SERIAL = Finding(
    "ranks run one after another",
    "the backend is 'serial', so the times of a step say nothing about a pipeline",
    'use backend="threads", or several processes',
    None,
)


def _shared_cores(run: Run) -> list[Finding]:
    """Note that ranks compete for cores, so that the expected gains are too optimistic."""
    made, machine = run.configuration, run.environment
    is_on_cpu = set(machine.devices) <= {"cpu"} and machine.num_cores > 0
    needed = made.num_ranks * made.num_replicas * max(machine.num_threads, 1)
    if not is_on_cpu or machine.num_processes > 1 or needed <= machine.num_cores:
        return []
    return [
        Finding(
            "more threads than cores",
            f"{made.num_ranks} ranks use {needed} threads on {machine.num_cores} cores, so the "
            "times of actions include waiting for a core",
            "expect less than the gains say, or use fewer ranks or torch.set_num_threads(1)",
            None,
        )
    ]
