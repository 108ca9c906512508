"""Runs as values for JSON. Text of a run is text for the page too, which never shows it as HTML."""

from __future__ import annotations

from typing import Any

from stageline.report.summary import in_groups
from stageline.report.timeline import Timeline
from stageline.runs.breakdown import PARTS
from stageline.runs.findings.findings import findings
from stageline.runs.pages.figures import numbers
from stageline.runs.run import Run, RunSummary
from stageline.studio.runs.folder import version_of

SECONDS_LIVE = (
    120.0  # since its last report; an unfinished run that is silent for longer may be dead
)
MOST_EVENTS = 100
CURVES = ("loss", "samples_per_second", "tokens_per_second", "bubble")


def described_summary(key: str, run: RunSummary) -> Any:
    """Return what the list shows of a run; requests for it use its key."""
    return {
        "key": key,
        "name": run.name,
        "version": version_of([run.folder]),
        "status": run.status,
        "started": run.started,
        "updated": run.updated,
        "schedule": run.schedule,
        "num_ranks": run.num_ranks,
        "step": run.step,
        "steps": run.steps,
        "loss": run.loss,
        "samples_per_second": run.samples_per_second,
    }


def described_curves(run: Run) -> Any:
    """Return the curves of a run, by step and by time."""
    return {
        "step": [line.step for line in run.metrics],
        "time": [line.time for line in run.metrics],
        **{name: [getattr(line, name) for line in run.metrics] for name in CURVES},
    }


def described_details(run: Run) -> Any:
    """Return all else that the page shows of a run."""
    made, plan = run.configuration, run.configuration.plan
    last = run.metrics[-1] if run.metrics else None
    return {
        "facts": _facts(run),
        "parts": PARTS,
        "breakdown": [{"rank": each.rank, "parts": each.parts} for each in run.breakdown],
        "measured": _timeline(run.measured[-1]) if run.measured else None,
        "predicted": _timeline(run.predicted) if run.predicted else None,
        "measured_step": run.measured_step,
        "placement": run.measured[-1].placement if run.measured else made.placement,
        "memory": last.peak_memory if last else (),
        "planned_memory": plan.peak_memory if plan else (),
        "is_memory_by_rank": last is not None and len(last.peak_memory) == made.num_ranks,
        "findings": [
            {
                "title": each.title,
                "measured": each.measured,
                "advice": each.advice,
                "gain": each.gain,
            }
            for each in findings(run)
        ],
        "events": [
            {
                "time": each.time,
                "kind": each.kind,
                "step": each.step,
                "message": each.message,
                "is_error": each.is_error,
                "is_warning": each.is_warning,
            }
            for each in reversed(run.events[-MOST_EVENTS:])
        ],
        "checkpoints": run.checkpoints,
        "notes": run.notes,
    }


def _facts(run: Run) -> dict[str, str]:
    """Return the run's configuration and machine by name; what is not known is left out."""
    made, machine = run.configuration, run.environment
    facts = {
        "schedule": made.schedule,
        "ranks": str(made.num_ranks or ""),
        "replicas": str(made.num_replicas) if made.num_replicas > 1 else "",
        "micro-batches": str(made.num_microbatches or ""),
        "layers by stage": numbers(made.balance),
        "recomputation": in_groups(made.recompute),
        "backend": made.backend,
        "optimizer": made.optimizer,
        "parameters": f"{made.num_parameters:,.0f}" if made.num_parameters else "",
        "plan": made.plan.description if made.plan else "",
        "resumed from step": str(run.resumed_from or ""),
        "options": ", ".join(f"{name}={value}" for name, value in made.options.items()),
        "devices": ", ".join(dict.fromkeys(machine.devices)),
        "cores": str(machine.num_cores or ""),
        "versions": f"stageline {machine.stageline}, torch {machine.torch}"
        if machine.torch
        else "",
    }
    return {name: text for name, text in facts.items() if text}


def _timeline(timeline: Timeline) -> Any:
    """Return for each rank its actions as [kind, stage, micro-batch, start, end], in ms."""
    return {
        "makespan": timeline.makespan,
        "rows": [
            [
                (action.kind.value, action.stage, action.microbatch, start, end)
                for action, start, end in row
            ]
            for row in timeline.spans
        ],
    }
