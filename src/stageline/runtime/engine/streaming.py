"""Mini-batches in, finished ones out: the caller's side of a stream.

in    0 1 2 3 4 5 ─┐                   two mini-batches are always on their way behind the one
out         0 1 2 ─┴ end: 3 4 5        that comes out; at the end they are finished too
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator

from stageline.errors import StageError
from stageline.runtime.backends.threads import Running
from stageline.runtime.engine.loop import Step, Stream


def finished(
    running: Running,
    stream: Stream,
    steps: Iterator[Step],
    ahead: int,
    check: Callable[[], None],
) -> Generator[Step, None, None]:
    """The steps when they are done, each `ahead` after it went in.

    What is on its way is finished if the steps end or raise, if nobody wants the rest, and if
    `check` finds fault with what was done meanwhile; not if a rank fails.
    """
    waiting: deque[int] = deque()
    error: Exception | None = None
    try:
        while error is None:
            try:
                step = next(steps)
            except StopIteration:
                break
            except Exception as raised:
                error = raised
                break
            waiting.append(stream.length)
            running.feed(step)
            if len(waiting) > ahead:
                running.wait(waiting[0])
                yield stream.steps.pop(waiting.popleft())
                check()
    except StageError:
        raise  # all ranks have stopped
    except BaseException:
        running.drain()
        raise
    _drain(running, error)
    while waiting:
        yield stream.steps.pop(waiting.popleft())
    if error is not None:
        raise error


def _drain(running: Running, error: Exception | None) -> None:
    """If only this rank's loader raised, the rest cannot be finished, and its error counts."""
    try:
        running.drain()
    except StageError as failure:
        raise error or failure from failure
