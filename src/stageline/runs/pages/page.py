"""The HTML page of one run."""

from __future__ import annotations

from stageline.runs.findings.findings import findings
from stageline.runs.findings.measured_step import MeasuredStep
from stageline.runs.pages import sections
from stageline.runs.pages.elements import document
from stageline.runs.run import Run


def run_page(run: Run) -> str:
    """Return a self-contained page: it runs no script, and asks for nothing."""
    parts = (
        sections.heading(run),
        sections.faster(run, findings(run)),
        sections.problems(run),
        sections.curves([(run.name, run)]),
        sections.where_time_goes(run),
        sections.timeline(run),
        sections.predictions(run, MeasuredStep.of(run)),
        sections.memory(run),
        sections.checkpoints(run),
        sections.settings(run),
    )
    return document(f"{run.name}: report", filter(None, parts))
