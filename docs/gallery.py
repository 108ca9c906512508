"""Draw the pictures of gallery.md: one of each schedule family, all on three ranks.

python docs/gallery.py
"""

from __future__ import annotations

from pathlib import Path

import stageline as sl
from stageline.report.timeline import Timeline

FOLDER = Path(__file__).parent / "pictures" / "gallery"
NUM_RANKS, NUM_MICROBATCHES = 3, 6  # the fewest micro-batches that all families take on three ranks
STREAMS = {"pipedream": (1, 6), "pipedream_2bw": (3, 3)}  # micro-batches each, and mini-batches


def example(name: str) -> Timeline:
    """Return the timeline that the page shows of a family; F, I and W take 1 for a rank's share."""
    num_microbatches, num_minibatches = STREAMS.get(name, (NUM_MICROBATCHES, None))
    schedule = sl.build_schedule(
        name,
        num_ranks=NUM_RANKS,
        num_microbatches=num_microbatches,
        num_minibatches=num_minibatches,
    )
    return sl.simulate(schedule, sl.Costs.of_a_rank(schedule.num_stages // NUM_RANKS))


def draw(folder: Path) -> None:
    """Write the pictures of all families."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in sl.schedule_names():
        example(name).save(folder / f"{name}.svg")


if __name__ == "__main__":
    draw(FOLDER)
