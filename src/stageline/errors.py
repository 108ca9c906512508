"""Every exception that Stageline raises on purpose.

    StagelineError
    ├── ScheduleError (ValueError)   a schedule or program that breaks a rule, or cannot be built
    ├── CostsError (ValueError)      costs that are negative, missing, or of the wrong length
    └── ReportError (ValueError)     a picture in a format that there is none for

A message says what was seen, what was expected and what to do, in that order.
"""


class StagelineError(Exception):
    """The root: `except StagelineError` catches everything that Stageline raises on purpose."""


class ScheduleError(StagelineError, ValueError):
    """A schedule that cannot be built, read or run."""


class CostsError(StagelineError, ValueError):
    """Costs that make no sense for the schedule they are used with."""


class ReportError(StagelineError, ValueError):
    """A timeline asked for in a form that it cannot take."""
