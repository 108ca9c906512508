"""Compare all options for training a profiled model on a cluster, as the page requests."""

from __future__ import annotations

from time import perf_counter
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from stageline.errors import PlanError
from stageline.limits import MOST_SAMPLES
from stageline.planning.cluster.cluster import Cluster
from stageline.planning.compare_ways import Way, WaysToTrain, compare_ways
from stageline.planning.plan import find_plan
from stageline.planning.plan_result import Plan
from stageline.planning.profiling.profile_result import Profile
from stageline.planning.search.candidate_schedules import DEFAULT_SCHEDULES
from stageline.planning.search.search import ReportProgress
from stageline.planning.search.training_layouts import PlanRequest
from stageline.planning.validation import parse_json
from stageline.schedules.build import schedule_names
from stageline.studio.plans.what_if import with_devices, with_link_speed, with_memory
from stageline.studio.requests import StudioRequest

MOST_SHOWN_STAGES = 200_000  # of all ways together: 3 MB of JSON
Samples = Annotated[int, Field(ge=1, le=MOST_SAMPLES)]


class ComparisonRequest(StudioRequest):
    """A profile and a cluster as JSON texts, and the settings of the page; None: as described."""

    profile: str
    cluster: str
    batch_size: Samples
    optimizer: Literal["sgd", "momentum", "adagrad", "adam", "adamw"] = "adamw"
    recompute: bool = True
    asynchronous: bool = False  # consider asynchronous schedules as well
    memory: str = ""  # of each device; '': as described
    link_speed: Annotated[float, Field(gt=0, le=1e6)] = 1.0  # times that of the cluster
    num_devices: Annotated[int, Field(ge=1)] | None = None
    microbatch_size: Samples | None = None

    def to_plan_request(self) -> PlanRequest:
        """Return the request for the planner; raise `PlanError` if a text is not valid."""
        if not self.profile.strip():
            raise PlanError("there is no profile: load an example, or what stageline profile saves")
        if not self.cluster.strip():
            raise PlanError("there is no cluster: load an example, or what stageline links saves")
        profile = parse_json(self.profile, Profile, "the profile")
        cluster = self._cluster()
        if (self.microbatch_size or 1) > self.batch_size:
            raise PlanError(
                f"microbatch_size is {self.microbatch_size}, but a batch has {self.batch_size} "
                "samples: use a smaller one"
            )
        sizes = self.batch_size, self.optimizer, None, self.recompute, self.microbatch_size
        return PlanRequest(profile, cluster, *sizes)

    def _cluster(self) -> Cluster:
        cluster = parse_json(self.cluster, Cluster, "the cluster")
        if self.num_devices is not None:
            cluster = with_devices(cluster, self.num_devices)
        if self.memory:
            cluster = with_memory(cluster, self.memory)
        return cluster if self.link_speed == 1 else with_link_speed(cluster, self.link_speed)

    @property
    def schedules(self) -> tuple[str, ...]:
        """The schedules to consider."""
        others = schedule_names(synchronous=False) if self.asynchronous else ()
        return (*DEFAULT_SCHEDULES, *others)


def compared(request: PlanRequest, schedules: tuple[str, ...], progress: ReportProgress) -> Any:
    """Search, and return what the page shows as values for JSON."""
    started = perf_counter()
    comparison = compare_ways(request, schedules, progress)
    cluster = request.cluster
    devices = cluster.devices or (cluster.device(0),)
    memory = [device.memory_bytes for device in devices]
    return {
        "seconds": perf_counter() - started,
        "batch_size": request.batch_size,
        "cluster": str(cluster),
        "memory": min(memory),  # of the smallest device
        "layers": _layers(request.profile),
        "message": comparison.message,
        "has_best": comparison.has_best,
        **_shown_ways(comparison),
    }


def planned(request: PlanRequest, schedules: tuple[str, ...], progress: ReportProgress) -> Any:
    """Search, and return the best as the text of a file that `sl.Plan.load` reads."""
    plan = find_plan(request, schedules, progress)
    return {"file": TypeAdapter(Plan).dump_json(plan, indent=1).decode()}


def _layers(profile: Profile) -> Any:
    """Return the costs of the layers for the largest micro-batch of the profile."""
    measurement = profile.measurements[-1]
    return {
        "samples": measurement.samples,
        "names": profile.names,
        "time": [layer.time for layer in measurement.layers],
        "activation": [layer.activation for layer in measurement.layers],
        "parameters": [layer.parameters for layer in measurement.layers],
    }


def _shown_ways(comparison: WaysToTrain) -> Any:
    """Return the fastest options, as many as can be shown, and how many there are in total."""
    shown, left = [], MOST_SHOWN_STAGES
    for way in comparison.ways:
        left -= len(way.cut.balance)
        if left < 0:
            break
        shown.append(_way(way))
    return {"ways": shown, "num_ways": len(comparison.ways)}


def _way(way: Way) -> Any:
    option = way.option
    return {
        "description": option.description,
        "schedule": option.schedule,
        "num_ranks": option.num_ranks,
        "replicas": option.replicas,
        "num_microbatches": option.num_microbatches,
        "samples": option.samples,
        "seconds": option.seconds,
        "bubble": option.bubble,
        "peak_memory": option.peak_memory,
        "verdict": option.verdict,
        "precision": way.precision.value,
        "fits": way.fits,
        "balance": way.cut.balance,
        "placement": way.cut.placement,
        "recompute": way.cut.recompute_modes,
    }
