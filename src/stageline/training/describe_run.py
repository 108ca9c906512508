"""Describe a training run for the record of its folder: configuration and environment."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import torch

from stageline import __version__
from stageline.arguments import shown
from stageline.options import Options
from stageline.pipeline import arguments_of, session_of
from stageline.pipeline_setup import default_backend
from stageline.planning.plan_result import Plan
from stageline.runs.records import MOST_STEPS, Configuration, Environment, PlannedCosts
from stageline.runtime.accelerators.measured_devices import device_name
from stageline.runtime.backends.backend import Group
from stageline.runtime.placement.layout import Layout
from stageline.training.run import TrainingRun


def configuration_of(run: TrainingRun) -> Configuration:
    """Return what is trained and how."""
    assembly, arguments = session_of(run.pipe).assembly, arguments_of(run.pipe)
    layout, schedule = assembly.layout, assembly.layout.schedule
    return Configuration(
        schedule=schedule.name,
        num_ranks=schedule.num_ranks,
        num_replicas=assembly.collectives.num_replicas,
        num_microbatches=schedule.num_microbatches,
        placement=schedule.placement,
        balance=layout.balance,
        recompute=assembly.settings.recompute,
        backend=arguments["backend"] or default_backend(arguments["mesh"]),
        options=dict(_options(arguments["options"])),
        optimizer=_optimizer_name(run),
        scheduler="" if run.scheduler is None else run.scheduler_name,
        max_norm=None if run.max_norm is None else float(run.max_norm),
        # some say 10**18 for without end, or for never
        steps=min(run.steps, MOST_STEPS),
        report_every=min(run.report_every, MOST_STEPS),
        save_every=min(run.save_every, MOST_STEPS),
        num_parameters=sum(weights.numel() for weights in layout.layers.modules.parameters()),
        layers=tuple(layer.name for layer in layout.layers),
        layer_types=tuple(type(layer.module).__name__ for layer in layout.layers),
        layer_costs=tuple(map(float, layout.costs)),
        plan=_planned(arguments["plan"]),
    )


def environment_of(run: TrainingRun) -> Environment:
    """Return the machine and the versions."""
    assembly = session_of(run.pipe).assembly
    return Environment(
        stageline=__version__,
        torch=torch.__version__,
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        num_cores=os.cpu_count() or 0,
        num_threads=torch.get_num_threads(),
        num_processes=assembly.collectives.size(Group.EVERYONE),
        devices=tuple(_device_names(assembly.layout)),
    )


def _optimizer_name(run: TrainingRun) -> str:
    optimizers = [run.optimizer] if run.optimizer is not None else run.pipe.optimizers
    return type(optimizers[0]).__name__ if optimizers else ""


def _options(options: Options) -> Iterator[tuple[str, str]]:
    """Yield the options that differ from the defaults."""
    for field in fields(Options):
        value = getattr(options, field.name)
        if value != field.default:
            yield field.name, _shown_option(value)


def _shown_option(value: Any) -> str:
    if callable(value):
        return getattr(value, "__qualname__", type(value).__name__)
    return value if isinstance(value, str) else shown(value)


def _planned(plan: Plan | None) -> PlannedCosts | None:
    if plan is None:
        return None
    chosen = plan.chosen
    return PlannedCosts(chosen.description, chosen.seconds, plan.costs, plan.peak_memory)


def _device_names(layout: Layout) -> Iterator[str]:
    for rank, device in enumerate(layout.devices):
        if device is None:
            yield "cpu"
        else:
            yield device_name(device) if rank in layout.ranks_here else str(device)
