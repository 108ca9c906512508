"""The limits on sizes, each with the numbers it was derived from.

A size above its limit raises an error within a second, before anything is built. A limit is far
above what is useful and below what a machine can hold, so that a typing error or a damaged file
gives an error message, and not minutes of work that end out of memory.
"""

from __future__ import annotations

from stageline.arguments import shown
from stageline.errors import ScheduleError, StagelineError

# Ranks and stages of one pipeline. Models have some hundred layers, and a stage has at least one.
MOST_STAGES = 10_000
# Pairs of a stage and a micro-batch, over all mini-batches. Each has two or three actions of 100
# bytes, or 400 bytes when simulated: 4 to 6 GB and some minutes at the limit. A pipeline of 1,000
# ranks with 4,000 micro-batches is within it.
MOST_PLACES = 5_000_000
# Layers of a model in a plan: partitions are searched in tables of layers × stages.
MOST_LAYERS = 100_000
# Devices of a cluster. The largest clusters built so far have about 100,000.
MOST_DEVICES = 200_000
# Samples of a mini-batch. The largest in use are 80,000 images, or 16 million tokens in sequences
# of some thousand; a plan considers schedules of up to as many micro-batches.
MOST_SAMPLES = 1_000_000
# Any other count in a file.
MOST_COUNT = 10**9
# Actions in one picture. Each takes 150 bytes, 150 MB in all; most viewers fail before that.
MOST_DRAWN = 1_000_000
# Actions of a value that a notebook shows by itself: simulated and drawn in a second.
MOST_SHOWN = 150_000
# Cells of a timeline as text, drawn in a few seconds. Beyond that, cells stand for more time.
MOST_CELLS = 2_000_000
# Processes on one machine. Each takes 200 MB for PyTorch alone.
MOST_PROCESSES = 1_000
# Restarts of the same processes: at a second each, more than a week.
MOST_RESTARTS = 1_000_000
# Amounts (seconds, bytes, rates) other than 0. Their quotients, summed over all actions and
# squared, stay within the range of a float: (1e60 / 1e-60 · 1e7)² = 1e254.
MOST_AMOUNT = 1e60
LEAST_AMOUNT = 1e-60
# Bytes of a file. The largest schedule has 15 million actions of 8 characters; other files hold
# numbers for each layer or stage, 1 MB for a thousand layers.
MOST_SCHEDULE_BYTES = 128 * 2**20
MOST_PLAN_BYTES = 64 * 2**20  # also a schedule, but its numbers take 16 times as much memory
MOST_FILE_BYTES = 16 * 2**20


def check_most(
    name: str,
    size: int,
    most: int,
    advice: str = "use fewer",
    error: type[StagelineError] = ScheduleError,
) -> None:
    """Raise if a size is above its limit."""
    if size > most:
        raise error(f"{name} is {shown(size)}, but can be {most:,} at most: {advice}")


def check_pipeline(num_stages: int, num_microbatches: int, num_minibatches: int = 1) -> None:
    """Raise if a schedule of these sizes could not be held in memory."""
    check_most("the number of stages", num_stages, MOST_STAGES, "use fewer ranks or chunks")
    total = num_microbatches * num_minibatches
    if num_stages * total > MOST_PLACES:
        streams = f" in {shown(num_minibatches)} mini-batches" if num_minibatches > 1 else ""
        raise ScheduleError(
            f"{num_stages} stages with {shown(num_microbatches)} micro-batches{streams} are "
            f"{shown(num_stages * total)} forwards, but a schedule can have {MOST_PLACES:,} at "
            f"most: use at most {max(1, MOST_PLACES // num_stages // num_minibatches):,} "
            "micro-batches, or fewer stages or mini-batches"
        )
