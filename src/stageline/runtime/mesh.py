"""Where this process stands among all: in its pipeline, beside its replicas, in its tensor group.

dp = 2, pp = 3      replica 0 │ rank 0  rank 1  rank 2       a row is a pipeline,
                    replica 1 │ rank 0  rank 1  rank 2       a column holds the same stages
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from stageline.errors import ModelError, StageError

NAMES = ("dp", "pp", "tp")


@dataclass(frozen=True)
class Place:
    """Groups of our own, so that what we do with them disturbs nobody."""

    pipeline: dist.ProcessGroup
    everyone: dist.ProcessGroup
    replicas: dist.ProcessGroup | None  # None: there is one replica
    replica: int
    num_replicas: int
    speaks: bool  # of several processes with the same part of the same replica, one speaks

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        found = (self.pipeline, self.everyone, self.replicas)
        return [group for group in found if group is not None]

    def close(self) -> None:
        for group in self.groups:
            destroy(group)


def destroy(group: dist.ProcessGroup) -> None:
    """Unless that is done already, for this group or for all at once."""
    with suppress(ValueError):
        if dist.is_initialized():
            dist.destroy_process_group(group)


def find_place(mesh: DeviceMesh | None, num_ranks: int, limit: float) -> Place:
    """Every process of the mesh calls this, and waits so many seconds for the others."""
    if not dist.is_initialized():
        raise ModelError(
            "backend is 'processes', but there is no process group: start the script with torchrun "
            "and call torch.distributed.init_process_group()"
        )
    grid = _grid(mesh)
    if grid.shape[1] != num_ranks:
        found = f"{grid.shape[1]} processes" if mesh is None else f"{grid.shape[1]} in mesh's 'pp'"
        raise ModelError(f"num_ranks is {num_ranks}, but there are {found}: use as many")
    dp, _, tp = (int(index) for index in (grid == dist.get_rank()).nonzero()[0])
    return Place(
        _own_group([row for plane in grid.permute(0, 2, 1).tolist() for row in plane], limit),
        _own_group([grid.flatten().tolist()], limit),
        _own_group([row for plane in grid.permute(1, 2, 0).tolist() for row in plane], limit)
        if len(grid) > 1
        else None,
        dp,
        len(grid),
        tp == 0,
    )


def _grid(mesh: DeviceMesh | None) -> torch.Tensor:
    """Global ranks by replica, rank of the pipeline, and place in the tensor group."""
    if mesh is None:
        return torch.arange(dist.get_world_size()).view(1, -1, 1)
    names = mesh.mesh_dim_names or ()
    if "pp" not in names or not set(names) <= set(NAMES):
        raise ModelError(
            f"mesh has dimensions {names or 'without names'}, but needs 'pp', and may have 'dp' "
            "and 'tp': use init_device_mesh(…, mesh_dim_names=('dp', 'pp'))"
        )
    grid = mesh.mesh
    order = [names.index(name) for name in NAMES if name in names]
    grid = grid.permute(order)
    for position, name in enumerate(NAMES):
        if name not in names:
            grid = grid.unsqueeze(position)
    return grid


def _own_group(rows: list[list[int]], limit: float) -> dist.ProcessGroup:
    """All processes make all groups, in the same order; gives back the one that this is in."""
    try:
        groups = [dist.new_group(row, timeout=timedelta(seconds=limit)) for row in rows]
    except RuntimeError as error:
        raise StageError(
            f"rank {dist.get_rank()} could not reach the others within {limit:g} s, when a "
            f"pipeline was made: has one of them ended, or made none?\n  {error}"
        ) from None
    mine = next(g for g, row in zip(groups, rows, strict=True) if dist.get_rank() in row)
    assert isinstance(mine, dist.ProcessGroup)  # those that this is not in are no groups here
    return mine
