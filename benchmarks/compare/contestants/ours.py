"""Stageline, over processes and in threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.compare.contestants.contestant import Contestant, nothing, rank
from benchmarks.compare.workloads import Case
from torch.distributed.device_mesh import init_device_mesh

import stageline as sl
from stageline.report.timeline import Timeline

PROCESSES, THREADS, SERIAL = "stageline", "stageline, threads", "stageline, serial"
PLANNED = "stageline, planned"
Init = Callable[[sl.Layer], object]
# as all others do: running statistics take in each micro-batch, without a common pass over them
OPTIONS = sl.Options(batch_norm="microbatch")


def processes(
    case: Case,
    schedule: sl.Schedule,
    balance: Sequence[int],
    name: str = PROCESSES,
    init_fn: Init | None = None,
    options: sl.Options = OPTIONS,
) -> Contestant:
    """Return a pipeline with a rank in each process."""
    return _contestant(name, case, schedule, balance, "processes", init_fn, options)


def threads(
    case: Case, schedule: sl.Schedule, balance: Sequence[int], name: str = THREADS
) -> Contestant:
    """Return a pipeline in the first process, with a thread for each rank."""
    if rank() != 0:
        return Contestant(name, case.layers, nothing)
    return _contestant(name, case, schedule, balance, "threads")


def serial(case: Case, num_microbatches: int, name: str = SERIAL) -> Contestant:
    """Return a pipeline of one rank in the first process."""
    schedule = sl.build_schedule("1f1b", num_ranks=1, num_microbatches=num_microbatches)
    return _contestant(name, case, schedule, [len(case.layers)], "serial")


def planned(case: Case, plan: sl.Plan, init_fn: Init | None = None) -> Contestant:
    """Return a pipeline as it was planned, with a rank or a replica in each process."""
    sizes = plan.chosen.replicas, plan.chosen.num_ranks
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "pp"))
    pipe = sl.Pipeline(
        case.layers, case.loss_fn, plan=plan, mesh=mesh, init_fn=init_fn, options=OPTIONS
    )
    return _of_pipeline(PLANNED, case.part(mesh.get_local_rank("dp"), plan.chosen.replicas), pipe)


def _contestant(
    name: str,
    case: Case,
    schedule: sl.Schedule,
    balance: Sequence[int],
    backend: str,
    init_fn: Init | None = None,
    options: sl.Options = OPTIONS,
) -> Contestant:
    pipe = sl.Pipeline(
        case.layers,
        case.loss_fn,
        num_ranks=schedule.num_ranks,
        num_microbatches=schedule.num_microbatches,
        schedule=schedule,
        balance=balance,
        backend=backend,
        init_fn=init_fn,
        options=options,
    )
    return _of_pipeline(name, case, pipe)


def _of_pipeline(name: str, case: Case, pipe: sl.Pipeline) -> Contestant:
    def step() -> Any:
        return pipe.step(case.inputs, case.target)

    def traced() -> Timeline:
        with pipe.trace() as trace:
            step()
        return trace.timeline

    return Contestant(name, case.layers, step, _loss, pipe.close, trace=traced)


def _loss(result: Any) -> float:
    return float(result.loss)
