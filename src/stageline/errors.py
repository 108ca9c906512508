"""Every exception that Stageline raises on purpose.

    StagelineError
    ├── ScheduleError (ValueError)   a schedule or program that breaks a rule, or cannot be built
    ├── CostsError (ValueError)      costs that are negative, missing, or of the wrong length
    ├── ReportError (ValueError)     a picture in a format that there is none for
    ├── ModelError (ValueError)      a model that cannot be seen as layers, or cut into stages
    ├── BatchError (ValueError)      inputs and targets that cannot be cut into micro-batches
    ├── PlanError (ValueError)       a profile, cluster or plan that makes no sense, or does not fit
    ├── CheckpointError (ValueError) a checkpoint that cannot be written, or does not fit
    ├── StageError (RuntimeError)    a layer that raised: where, in which action, and its cause
    └── ParityError (RuntimeError)   a pipeline whose numbers are not those of a plain loop

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


class ModelError(StagelineError, ValueError):
    """A model whose layers are not known, or that does not fit the number of stages."""


class BatchError(StagelineError, ValueError):
    """A mini-batch that cannot be cut into micro-batches."""


class PlanError(StagelineError, ValueError):
    """A profile, cluster or plan that cannot be read, used, or found."""


class CheckpointError(StagelineError, ValueError):
    """A checkpoint that is not there, not whole, not of this model, or could not be written."""


class StageError(StagelineError, RuntimeError):
    """A layer raised. The message names rank, layer and action; `__cause__` is what it raised."""


class ParityError(StagelineError, RuntimeError):
    """The first gradient or buffer that differs from a plain loop's, and by how much."""
