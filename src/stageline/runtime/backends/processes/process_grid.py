"""The grid of processes: replicas of the pipeline, its ranks, and parts of tensors."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from stageline.errors import ModelError

NAMES = ("dp", "pp", "tp")


def checked_grid(mesh: DeviceMesh | None, num_ranks: int, *, has_siblings: bool) -> torch.Tensor:
    """Return the grid of global ranks; raise unless it has a process for each rank."""
    if not dist.is_initialized():
        raise ModelError(
            "backend is 'processes', but there is no process group: start the script with torchrun "
            "and call torch.distributed.init_process_group()"
        )
    grid = _grid(mesh)
    if grid.shape[1] != num_ranks:
        found = f"{grid.shape[1]} processes" if mesh is None else f"{grid.shape[1]} in mesh's 'pp'"
        raise ModelError(f"num_ranks is {num_ranks}, but there are {found}: use as many")
    if has_siblings and grid.numel() > num_ranks:
        raise ModelError(
            f"mesh has {grid.numel()} processes for {num_ranks} ranks with replicas of stages, but "
            "replicas of single stages and of the whole pipeline do not go together: use one"
        )
    return grid


def process_name(index: int, grid: torch.Tensor) -> str:
    """Return the name of a process in errors: its rank, and its replica and part if needed."""
    num_replicas, num_ranks, num_parts = grid.shape
    replica, rest = divmod(index, num_ranks * num_parts)
    rank, part = divmod(rest, num_parts)
    return (
        f"rank {rank}"
        + (f" of replica {replica}" if num_replicas > 1 else "")
        + (f" (tensor part {part})" if num_parts > 1 else "")
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
