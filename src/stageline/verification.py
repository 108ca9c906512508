"""Hold pipelines of a user's model to a plain loop, schedule by schedule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from stageline.errors import ModelError, ParityError, ScheduleError
from stageline.pipeline import Pipeline
from stageline.runtime.settings import LossFunction


class Case(NamedTuple):
    """What a user's function returns."""

    model: Any
    loss_fn: LossFunction
    inputs: Any
    target: Any

    @staticmethod
    def of(made: Any) -> Case:
        if not isinstance(made, tuple) or len(made) != len(Case._fields):
            found = f"{len(made)} things" if isinstance(made, tuple) else f"a {type(made).__name__}"
            raise ModelError(
                f"the function returned {found}, but has to return a tuple of "
                f"{', '.join(Case._fields)}"
            )
        if not callable(made[1]):
            raise ModelError(f"loss_fn is {made[1]!r}, but has to be a function of output, target")
        return Case(*made)


class Outcome(NamedTuple):
    """What came of one schedule."""

    schedule: str
    is_equal: bool | None  # None: it cannot be built for these sizes
    reason: str = ""


def verify_each(case: Case, schedules: Iterable[str], **options: Any) -> Iterator[Outcome]:
    """One after another; the model is left as it was."""
    for name in schedules:
        try:
            pipe = Pipeline(case.model, case.loss_fn, schedule=name, **options)
        except ScheduleError as error:
            yield Outcome(name, None, str(error).splitlines()[0])
            continue
        try:
            pipe.verify(case.inputs, case.target)
            yield Outcome(name, is_equal=True)
        except ParityError as error:
            yield Outcome(name, is_equal=False, reason=str(error))
        finally:
            pipe.close()
