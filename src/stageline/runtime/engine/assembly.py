"""Stages and programs, put together for a layout; `replan` puts them together anew."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from stageline.runtime.backends.backend import Collectives, Group
from stageline.runtime.engine.handlers import HANDLERS
from stageline.runtime.engine.loop import Loop
from stageline.runtime.engine.replicas import Replicas
from stageline.runtime.engine.sharded_layers import ShardedLayers, has_sharded_modules
from stageline.runtime.exactness.shared_buffers import SharedBuffers
from stageline.runtime.exactness.tied_weights import TiedWeights
from stageline.runtime.optimizers.clip_after_step import LateClipping
from stageline.runtime.optimizers.stage_optimizers import StageOptimizers
from stageline.runtime.placement.checks import edges_of, is_asynchronous
from stageline.runtime.placement.layout import Layout
from stageline.runtime.settings import Settings
from stageline.runtime.stage.offload import HostMemory
from stageline.runtime.stage.stage import Stage
from stageline.schedules.program.lower_period import lower_period
from stageline.schedules.program.program import Epilogue
from stageline.schedules.program.stream import as_stream
from stageline.schedules.schedule import Schedule
from stageline.torch_private import BatchNormBase


@dataclass(frozen=True)
class Assembly:
    """The stages of a layout, and the programs that run on them."""

    layout: Layout
    settings: Settings
    collectives: Collectives
    tied: TiedWeights
    stages: tuple[Stage, ...]
    replicas: Replicas
    shared_buffers: SharedBuffers
    sharded: ShardedLayers | None  # None: no weights are in shards on several replicas
    clips_late: bool  # gradients are clipped after a step that can be taken back, without barriers

    @cached_property
    def is_asynchronous(self) -> bool:
        return is_asynchronous(self.layout.schedule)

    @property
    def needs_barriers(self) -> bool:
        """Return whether ranks wait for each other at the end of each mini-batch, also in `run`.

        They do if layers share weights, or if gradients are clipped and a step cannot be undone.
        """
        clips_early = self.settings.max_norm is not None and not self.clips_late
        return clips_early or bool(self.tied.by_weight and not self.is_asynchronous)

    @cached_property
    def step_loop(self) -> Loop:
        """Return the loop for one mini-batch at a time."""
        clips = self.settings.max_norm is not None
        return self._loop(self.layout.schedule, clips=clips)

    @cached_property
    def stream_loop(self) -> Loop:
        """Return the loop for mini-batches that follow each other without a barrier."""
        schedule = self.layout.schedule
        if schedule.is_stream or self.needs_barriers:
            return self.step_loop
        return self._loop(as_stream(schedule, 1), clips=False)

    def late_clipping(self, optimizers: StageOptimizers) -> LateClipping | None:
        return LateClipping(optimizers, self.stream_loop) if self.clips_late else None

    def _loop(self, schedule: Schedule, *, clips: bool) -> Loop:
        edges, _ = edges_of(self.layout.layers, self.layout.stages)
        epilogue = Epilogue(
            bool(self.tied.by_weight) and not self.is_asynchronous,
            tuple(n for n, stage in enumerate(self.stages) if stage.statistics.modules),
            clips,
        )
        return Loop(
            lower_period(schedule, edges, epilogue),
            self.layout,
            self.stages,
            self.settings.recompute,
            self.tied,
            self.replicas,
            HANDLERS,
        )


def assemble(
    layout: Layout,
    settings: Settings,
    collectives: Collectives,
    tied: TiedWeights,
    optimizers: StageOptimizers | None,
) -> Assembly:
    """Make the stages of a layout whose layers are where they belong."""
    sharded = ShardedLayers.of(layout, collectives)
    return Assembly(
        layout,
        settings,
        collectives,
        tied,
        tuple(_stages(layout, settings, tied)),
        Replicas(collectives, layout, sharded),
        SharedBuffers(layout.layers, layout.stages),
        sharded,
        not tied.by_weight and _clips_late(layout, settings, collectives, optimizers),
    )


def _stages(layout: Layout, settings: Settings, tied: TiedWeights) -> list[Stage]:
    _, sent = edges_of(layout.layers, layout.stages)
    stages = []
    for number, (layers, values) in enumerate(zip(layout.stages, sent, strict=True)):
        accelerator = layout.accelerator(layout.schedule.placement[number])
        memory = None
        if settings.offload and accelerator is not None:
            memory = HostMemory(accelerator, number)
        modes = settings.batch_norm, settings.accumulate
        stages.append(
            Stage(
                layout.layers,
                layers,
                values,
                tied,
                *modes,
                layout.stage_device(number),
                accelerator,
                memory,
                uses_threads=layout.uses_threads,
                embedding_rows=settings.embedding_rows,
            )
        )
    return stages


def _clips_late(
    layout: Layout,
    settings: Settings,
    collectives: Collectives,
    optimizers: StageOptimizers | None,
) -> bool:
    """Return whether steps can be undone and forwards repeated, on all ranks."""
    if optimizers is None or settings.max_norm is None:
        return False
    modules = (m for layer in layout.layers for m in layer.module.modules())
    has_norms = any(isinstance(module, BatchNormBase) for module in modules)
    keeps_state = has_norms and settings.batch_norm == "microbatch"
    is_repeatable = not keeps_state and not has_sharded_modules(layout.layers)
    own = is_repeatable and optimizers.is_undoable
    return all(collectives.gather(own, "whether steps can be undone", Group.EVERYONE))
