from __future__ import annotations

import pytest

from stageline.costs import Costs
from stageline.report.spans import Span
from stageline.report.timeline import Timeline
from stageline.schedules.action import Action, Kind
from stageline.schedules.schedule import Schedule
from stageline.simulation.simulate import simulate


@pytest.fixture
def two_ranks() -> Timeline:
    """1F1B, two micro-batches: rank 1 waits for one forward, rank 0 for two backwards."""
    rows = ("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")
    return simulate(Schedule.from_text(*rows, name="1f1b"))


@pytest.fixture
def v_shape() -> Timeline:
    """Stages 0 and 3 on rank 0, stages 1 and 2 on rank 1, with split backwards."""
    rows = ("0F0 3F0 3I0 3W0 0I0 0W0", "1F0 2F0 2I0 1I0 2W0 1W0")
    return simulate(Schedule.from_text(*rows, name="v"))


@pytest.fixture
def odd_one() -> Timeline:
    """An action without duration, an empty rank, an optimizer step and a name with markup."""
    spans = (
        (Span(Action(0, Kind.F, 0), 0.0, 0.0), Span(Action(0, Kind.STEP), 0.0, 2.0)),
        (),
    )
    return Timeline(spans, (0, 1), Costs(), name="<a & 'b'>\x07")


@pytest.fixture
def nothing() -> Timeline:
    return Timeline(((), ()), (0, 1))
