"""Faults of one rank of three, and how long the other two take to end with its name.

    python benchmarks/faults.py      all of them, for the table in docs/scaling.md
    python benchmarks/faults.py --place save --kind SIGSTOP --culprit 0

Every rank has to end within the pipeline's timeout + 5 s, with an error that names the culprit; a
rank that was not there when the pipeline was made has the limit of start-up instead.
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.distributed.fork_servers import fork_servers
from tests.distributed.strike import Outcome, strike
from tests.distributed.workers.faults import KINDS, PLACES, START_UP, TIMEOUT

WORDS = {"raise": "raises", "exit": "leaves"}


def main(
    place: Annotated[list[str] | None, typer.Option(help="Where; all places if omitted.")] = None,
    kind: Annotated[list[str] | None, typer.Option(help="Of which kind; all if omitted.")] = None,
    culprit: Annotated[list[int] | None, typer.Option(help="Which rank: 0 and 1.")] = None,
) -> None:
    """Strike, and print a Markdown table of seconds until all others have ended."""
    places, kinds, culprits = place or [*PLACES], kind or [*KINDS], culprit or [0, 1]
    cases = [(p, k, c) for p in places for k in kinds for c in culprits]
    found: dict[tuple[str, str, int], Outcome] = {}
    with fork_servers():
        for case in cases:
            with TemporaryDirectory() as folder:
                found[case] = strike(*case, Path(folder))
            print(*case, found[case].cell, found[case].problem or "", flush=True)
    print(f"| where | {' | '.join(WORDS.get(k, k) for k in kinds)} |")
    print("|---|" + "---|" * len(kinds))
    for p in places:
        cells = [" and ".join(found[p, k, c].cell for c in culprits) for k in kinds]
        print(f"| {p} | {' | '.join(cells)} |")
    good = sum(outcome.problem is None for outcome in found.values())
    print(f"\n{good} of {len(found)} faults ended every rank in time with the culprit's name")
    print(f"timeout {TIMEOUT:g} s, start-up {START_UP:g} s; culprits: ranks {culprits}")
    raise SystemExit(good < len(found))


if __name__ == "__main__":
    typer.run(main)
