"""The life of a mini-batch: it is fed into a stream, runs, and comes out done.

    in    0 1 2 3 4 5 ─┐                   two mini-batches are always on their way behind the one
    out         0 1 2 ─┴ end: 3 4 5        that comes out; at the end they are finished too

Everything goes this way: `step` is a stream of one mini-batch that trains, an evaluation is one
that does not.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from stageline.errors import ModelError, StageError
from stageline.model.device_settings import generators_in_use, states
from stageline.runtime.accelerators.device_clock import DeviceClock
from stageline.runtime.backends.backend import Backend, Running
from stageline.runtime.backends.outside_autocast import RunningOutsideAutocast
from stageline.runtime.backends.processes.agreement import check_agreement
from stageline.runtime.engine.assembly import Assembly
from stageline.runtime.engine.loop import Loop
from stageline.runtime.engine.minibatch import MiniBatch, Purpose, Stream
from stageline.runtime.engine.recorder import Recorder, Recording
from stageline.runtime.engine.run_everywhere import everywhere
from stageline.runtime.exactness.randomness.watched_draws import WatchedDraws
from stageline.runtime.exactness.state_values import are_equal_generators, global_generators
from stageline.runtime.exactness.weight_aliases import UnchangedWeights
from stageline.runtime.optimizers.stage_optimizers import StageOptimizers
from stageline.runtime.placement.materialise import UninitializedTensor, check_initialized

MiniBatches = Generator[MiniBatch, None, None]


class Closeable(Protocol):
    """Something that ends with a session."""

    def close(self) -> None: ...


class Session:
    """A pipeline at work. State: the assembly, the number of steps, and what was seen of layers."""

    def __init__(
        self,
        assembly: Assembly,
        backend: Backend,
        optimizers: StageOptimizers | None,
        blanks: list[UninitializedTensor],
        seed: int,
    ) -> None:
        self.assembly, self.backend, self.optimizers = assembly, backend, optimizers
        self.blanks = blanks  # tensors without values, until the first mini-batch
        self.seed, self.num_steps = seed, 0
        self.is_streaming = False
        self.recorder: Recorder | None = None
        self.checkpoints: Closeable | None = None  # what saves them, once something does
        self.has_agreed = False  # with other processes, that all are about to do the same
        self.has_warned = False  # of generators that all stages share
        self.has_scaled_gradients = False  # since the last `unscale_`

    @property
    def ahead(self) -> int:
        """Return how many mini-batches are on their way behind the one that `run` gives back."""
        return 0 if self.assembly.needs_barriers else self._lag + 1

    @property
    def _lag(self) -> int:
        return self.assembly.stream_loop.period.lag + self.assembly.clips_late

    @property
    def _recording(self) -> dict[str, Any]:
        """Return the fields of a stream that say whether and how it records times."""
        if self.recorder is None:
            return {}
        return {"records": True, "timers": self.recorder.timers}

    def run(
        self, minibatch: MiniBatch, purpose: Purpose, optimizers: StageOptimizers | None = None
    ) -> None:
        """Run one mini-batch: a stream that is over when it is done."""
        loop = self.assembly.step_loop
        stream = Stream(purpose, loop.period.lag, optimizers, **self._recording)
        for _ in self._stream(loop, stream, iter([minibatch]), ahead=1):
            pass

    def stream(self, minibatches: Iterator[MiniBatch]) -> MiniBatches:
        """Train on mini-batches that follow each other; yield them when they are done."""
        assert self.optimizers is not None
        clipping = self.assembly.late_clipping(self.optimizers)
        stream = Stream(
            Purpose.TRAIN,
            self._lag,
            self.optimizers,
            clipping.run_rank if clipping else None,
            is_open=True,
            **self._recording,
        )
        return self._stream(self.assembly.stream_loop, stream, minibatches, self.ahead)

    def _stream(
        self, loop: Loop, stream: Stream, minibatches: Iterator[MiniBatch], ahead: int
    ) -> MiniBatches:
        with self._opened(loop, stream):
            running = RunningOutsideAutocast(self.backend.start(loop, stream))
            fed = self._prepared(minibatches, stream)
            yield from finished(running, stream, fed, ahead, self._check_options)

    def _prepared(self, minibatches: Iterator[MiniBatch], stream: Stream) -> Iterator[MiniBatch]:
        """Yield mini-batches when everything is ready for them."""
        for minibatch in minibatches:
            self._agree(minibatch)
            if not stream.length or self.assembly.needs_barriers:
                self.assembly.tied.refresh()
            if self.assembly.sharded is not None:
                self.assembly.sharded.check_length(len(minibatch.inputs))
            if not stream.is_open and len(minibatch.inputs) > 1 and stream.purpose.trains:
                self._watch_weights()
            yield minibatch

    def _check_options(self) -> None:
        if self.is_streaming and self.optimizers is not None:
            self.optimizers.check()

    @contextmanager
    def _opened(self, loop: Loop, stream: Stream) -> Iterator[None]:
        """Prepare stages for a stream, and leave them as they should be after it."""
        self.check_idle()
        if stream.is_open:
            self._check_no_gradients()
        self.is_streaming = stream.is_open
        stages = self.assembly.stages
        watched = [s.draws for s in stages if isinstance(s.draws, WatchedDraws)]
        trusts = [draws.trusts for draws in watched]
        try:
            for draws in watched:  # in a stream, the caller may draw from torch's generator too
                draws.trusts = draws.trusts and not stream.is_open
            self._begin(loop, stream)
            with self._shared_buffers_unchanged(), self._generators_watched(stream):
                yield
        except BaseException:
            for stage in stages:  # it may have failed for what a layer began to do
                stage.inner_gradients.first_step = None
            raise
        finally:
            self.is_streaming = False
            if stream.optimizers is not None:
                stream.optimizers.end()
            for stage in stages:
                stage.versions = stage.unchanged_weights = None
                stage.statistics.clear()
            for draws, trusted in zip(watched, trusts, strict=True):
                draws.trusts = trusted
            if self.assembly.sharded is not None:
                self.assembly.sharded.end()
            if stream.is_open:
                self._clear_gradients()
            self._record(loop, stream)

    def _check_no_gradients(self) -> None:
        """Raise before anything changes: a stream ends without gradients, and would lose them."""
        if any(parameter.grad is not None for parameter in self.assembly.layout.parameters()):
            raise ModelError(
                "some parameters have gradients, but a stream begins without any: call "
                "pipe.zero_grad() before run"
            )

    def _begin(self, loop: Loop, stream: Stream) -> None:
        if self.assembly.sharded is not None:
            self.assembly.sharded.begin()
        if stream.purpose.trains:
            self.assembly.replicas.set_gradients_aside()
        if stream.optimizers is not None:
            stream.optimizers.begin()
        if stream.is_open:
            self._watch_weights()
            for stage in self.assembly.stages:
                is_here = self.assembly.layout.is_here(stage.numbers[0])
                if is_here and self.assembly.is_asynchronous:
                    stage.keep_versions(loop.depth_of(stage))

    def _watch_weights(self) -> None:
        """Watch for hooks that change weights while micro-batches are on their way."""
        layout = self.assembly.layout
        for number, stage in enumerate(self.assembly.stages):
            stage.unchanged_weights = UnchangedWeights(layout.stage_parameters(number))

    def _clear_gradients(self) -> None:
        for parameter in self.assembly.layout.parameters():
            parameter.grad = None

    def _record(self, loop: Loop, stream: Stream) -> None:
        if self.recorder is not None and stream.records:
            sizes = stream.num_microbatches, stream.length
            self.recorder.recording = Recording(
                stream.times, stream.purpose, *sizes, loop.period, loop.senders
            )

    @contextmanager
    def recording(self) -> Iterator[Recorder]:
        """Record the last step of a block, and make its timeline."""
        layout = self.assembly.layout
        own = {rank: layout.accelerator(rank) for rank in layout.ranks_here}
        self.recorder = recorder = Recorder(
            {r: DeviceClock(each) for r, each in own.items() if each}
        )
        try:
            yield recorder
        finally:
            self.recorder = None
        recorder.finish(layout.schedule, layout.balance, self.assembly.collectives)

    def close(self) -> None:
        """Finish a save under way, and end the threads and the process groups."""
        try:
            if self.checkpoints is not None:
                self.checkpoints.close()
        finally:  # also if the save has failed
            if self.optimizers is not None:
                self.optimizers.release()
            self.backend.close()

    def check_idle(self) -> None:
        if self.is_streaming:
            raise ModelError(
                "a stream of run is on its way, but only one thing can be done at a time: use up "
                "its results, or close() it"
            )

    def _agree(self, minibatch: MiniBatch) -> None:
        """Check with other processes, once, that all are about to do the same."""
        if not self.has_agreed:
            assembly = self.assembly
            layout, blanks = assembly.layout, self.blanks
            everywhere(
                assembly.collectives,
                lambda: check_initialized(layout.layers, layout.device_of_layer, blanks),
            )
            self.blanks = []
            check_agreement(layout, assembly.settings.recompute, minibatch, assembly.collectives)
            self.has_agreed = True

    @contextmanager
    def _shared_buffers_unchanged(self) -> Iterator[None]:
        """Raise if a layer changes a buffer that other stages have too; the first run shows it."""
        shared = self.assembly.shared_buffers
        if not shared.shared:
            yield
            return
        shared.record()
        yield
        everywhere(self.assembly.collectives, shared.check)

    @contextmanager
    def _generators_watched(self, stream: Stream) -> Iterator[None]:
        """Look whether layers draw from generators that are shared, if nobody else does."""
        generators = generators_in_use()
        before, of_host = states(generators), global_generators()
        yield
        if stream.is_open:
            return
        uses_threads = self.assembly.layout.uses_threads
        if uses_threads and not all(map(torch.equal, states(generators), before)):
            self._stop_trusting()
        if self.assembly.layout.schedule.num_stages > 1 and not are_equal_generators(
            global_generators(), of_host
        ):
            self._warn_of_host_generators()

    def _stop_trusting(self) -> None:
        """Watch all layers: one that drew nothing before has begun to draw."""
        for stage in self.assembly.stages:
            if isinstance(stage.draws, WatchedDraws):
                stage.draws.watches_all = True
        warnings.warn(
            "random numbers were drawn from torch's own generator during a step, by a layer that "
            "drew none before, or by another thread of yours: in this step they depend on timing; "
            "from now on all layers are watched, and theirs do not",
            stacklevel=9,
        )

    def _warn_of_host_generators(self) -> None:
        """Warn that Python and numpy have one generator each, for all stages."""
        for stage in self.assembly.stages:
            stage.layer_state.uses_global_generators = None
        if not self.has_warned:
            self.has_warned = True
            warnings.warn(
                "a layer drew from the generator that Python or numpy have for everybody: if "
                "several stages do, what they draw depends on the schedule, and with threads on "
                "timing: draw with torch, or from a generator of the layer's own",
                stacklevel=9,
            )


def finished(
    running: Running,
    stream: Stream,
    minibatches: Iterator[MiniBatch],
    ahead: int,
    check: Callable[[], None],
) -> MiniBatches:
    """Yield mini-batches when they are done, each `ahead` after it went in.

    What is on its way is finished if the mini-batches end or raise, if the caller stops early, and
    if `check` finds that options were changed meanwhile; not if a rank fails.
    """
    waiting: deque[int] = deque()
    error: Exception | None = None
    try:
        while error is None:
            try:
                minibatch = next(minibatches)
            except StopIteration:
                break
            except Exception as raised:
                error = raised
                break
            waiting.append(stream.length)
            running.feed(minibatch)
            if len(waiting) > ahead:
                running.wait(waiting[0])
                yield stream.minibatches.pop(waiting.popleft())
                check()
    except StageError:
        raise  # all ranks have stopped
    except BaseException:
        running.drain()
        raise
    _drain(running, error)
    while waiting:
        yield stream.minibatches.pop(waiting.popleft())
    if error is not None:
        raise error


def _drain(running: Running, error: Exception | None) -> None:
    """Finish the rest; if only this rank's loader raised that cannot be, and its error counts."""
    try:
        running.drain()
    except StageError as failure:
        if error is None:
            raise
        raise error from failure
