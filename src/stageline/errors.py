"""Define all exceptions that Stageline raises.

    StagelineError
    ├── ScheduleError (ValueError)   a schedule or program that breaks a rule, or cannot be built
    ├── CostsError (ValueError)      costs that are negative, missing, or of the wrong length
    ├── ReportError (ValueError)     a timeline that cannot be drawn, or an unknown file format
    ├── ModelError (ValueError)      a model that cannot be split into layers or stages
    │   └── BalanceError             a balance that does not fit the model, of a `GPipe`
    ├── BatchError (ValueError)      inputs and targets that cannot be split into micro-batches
    ├── PlanError (ValueError)       an invalid profile, cluster or plan, or one that does not fit
    ├── CheckpointError (ValueError) a checkpoint that cannot be written, read or used
    ├── StageError (RuntimeError)    a layer raised: where, in which action, and the cause
    ├── SkipError (RuntimeError)     a layer that does not stash or pop what it declared
    ├── ParityError (RuntimeError)   a pipeline whose numbers differ from those of a plain loop
    ├── StreamOrderError (RuntimeError) memory of a device that is used in no certain order
    └── HostWaitError (RuntimeError) the host would wait for a device inside a step

A message says what was observed, what was expected and what to do, in that order.
"""


class StagelineError(Exception):
    """The base class of all exceptions that Stageline raises."""


class ScheduleError(StagelineError, ValueError):
    """A schedule that cannot be built, read or run."""


class CostsError(StagelineError, ValueError):
    """Costs that are invalid, or do not match the schedule."""


class ReportError(StagelineError, ValueError):
    """A timeline that cannot be drawn, or a file format that is not supported."""


class ModelError(StagelineError, ValueError):
    """A model that cannot be split into layers, or into the number of stages."""


class BalanceError(ModelError):
    """A balance that does not have a positive number of layers for each partition."""


class BatchError(StagelineError, ValueError):
    """A mini-batch that cannot be split into micro-batches."""


class PlanError(StagelineError, ValueError):
    """A profile, cluster or plan that cannot be read, used, or found."""


class CheckpointError(StagelineError, ValueError):
    """A checkpoint that is missing, incomplete, of another model, or could not be written."""


class StageError(StagelineError, RuntimeError):
    """A layer raised; the message names rank, layer and action, `__cause__` is the original."""


class SkipError(StagelineError, RuntimeError):
    """A layer that does not stash or pop what it has declared."""


class ParityError(StagelineError, RuntimeError):
    """A gradient or buffer differs from that of a plain loop; the message says by how much."""


class StreamOrderError(StagelineError, RuntimeError):
    """Two accesses of the same memory on different streams of a device that no event orders."""


class HostWaitError(StagelineError, RuntimeError):
    """Stageline's own code would wait for a device inside a step, and queue nothing meanwhile."""
