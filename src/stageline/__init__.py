"""Stageline: pipeline-parallel training, with every schedule as data.

Names are loaded when they are first used, and what needs no torch imports none:

    import stageline as sl
    schedule = sl.build_schedule("zbv", num_ranks=8, num_microbatches=24)
    print(sl.simulate(schedule))
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stageline.checkpoint.export import export as export
    from stageline.checkpoint.folder import latest as latest
    from stageline.checkpoint.load import load as load
    from stageline.checkpoint.pretrained.load_pretrained import load_pretrained as load_pretrained
    from stageline.checkpoint.save import save as save
    from stageline.costs import Costs as Costs
    from stageline.costs import Link as Link
    from stageline.errors import BatchError as BatchError
    from stageline.errors import CheckpointError as CheckpointError
    from stageline.errors import CostsError as CostsError
    from stageline.errors import ModelError as ModelError
    from stageline.errors import ParityError as ParityError
    from stageline.errors import PlanError as PlanError
    from stageline.errors import ReportError as ReportError
    from stageline.errors import ScheduleError as ScheduleError
    from stageline.errors import StageError as StageError
    from stageline.errors import StagelineError as StagelineError
    from stageline.model.layers import Layer as Layer
    from stageline.model.layers import LayerSequence as LayerSequence
    from stageline.model.uncut import Uncut as Uncut
    from stageline.options import Options as Options
    from stageline.pipeline import Pipeline as Pipeline
    from stageline.planning.cluster.cluster import Cluster as Cluster
    from stageline.planning.cluster.cluster import Device as Device
    from stageline.planning.cluster.cluster import Level as Level
    from stageline.planning.cluster.measure_links import measure_links as measure_links
    from stageline.planning.explain import explain as explain
    from stageline.planning.plan import plan as plan
    from stageline.planning.plan_result import Plan as Plan
    from stageline.planning.profiling.estimate import estimate as estimate
    from stageline.planning.profiling.measure_rates import measure_rates as measure_rates
    from stageline.planning.profiling.profile import profile as profile
    from stageline.planning.profiling.profile_result import Profile as Profile
    from stageline.report.timeline import Timeline as Timeline
    from stageline.runtime.batches.result import StepResult as StepResult
    from stageline.schedules.action import Action as Action
    from stageline.schedules.action import Kind as Kind
    from stageline.schedules.build import build_schedule as build_schedule
    from stageline.schedules.build import schedule_names as schedule_names
    from stageline.schedules.check import check as check
    from stageline.schedules.program.lower import lower as lower
    from stageline.schedules.program.program import Program as Program
    from stageline.schedules.schedule import Schedule as Schedule
    from stageline.schedules.search.search import search_schedule as search_schedule
    from stageline.simulation.simulate import simulate as simulate
    from stageline.training.fit import fit as fit

_HOMES = {
    "Action": "schedules.action",
    "BatchError": "errors",
    "CheckpointError": "errors",
    "Cluster": "planning.cluster.cluster",
    "Costs": "costs",
    "CostsError": "errors",
    "Device": "planning.cluster.cluster",
    "Kind": "schedules.action",
    "Layer": "model.layers",
    "LayerSequence": "model.layers",
    "Level": "planning.cluster.cluster",
    "Link": "costs",
    "ModelError": "errors",
    "ParityError": "errors",
    "Options": "options",
    "Pipeline": "pipeline",
    "Plan": "planning.plan_result",
    "PlanError": "errors",
    "Profile": "planning.profiling.profile_result",
    "Program": "schedules.program.program",
    "ReportError": "errors",
    "Schedule": "schedules.schedule",
    "ScheduleError": "errors",
    "StageError": "errors",
    "StagelineError": "errors",
    "StepResult": "runtime.batches.result",
    "Timeline": "report.timeline",
    "Uncut": "model.uncut",
    "build_schedule": "schedules.build",
    "check": "schedules.check",
    "estimate": "planning.profiling.estimate",
    "explain": "planning.explain",
    "export": "checkpoint.export",
    "fit": "training.fit",
    "latest": "checkpoint.folder",
    "load": "checkpoint.load",
    "load_pretrained": "checkpoint.pretrained.load_pretrained",
    "lower": "schedules.program.lower",
    "measure_links": "planning.cluster.measure_links",
    "measure_rates": "planning.profiling.measure_rates",
    "plan": "planning.plan",
    "profile": "planning.profiling.profile",
    "save": "checkpoint.save",
    "schedule_names": "schedules.build",
    "search_schedule": "schedules.search.search",
    "simulate": "simulation.simulate",
}

__version__ = "0.1.0"
__all__ = list(_HOMES)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'stageline' has no attribute {name!r}")
    value = getattr(import_module(f"stageline.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
