"""Where this process stands among all: in its pipeline, beside its replicas, in its tensor group.

dp = 2, pp = 3      replica 0 │ rank 0  rank 1  rank 2       a row is a pipeline,
                    replica 1 │ rank 0  rank 1  rank 2       a column holds the same stages
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from stageline.errors import ModelError, StageError

NAMES = ("dp", "pp", "tp")
HANG_UP = 1  # tag of no message


class OwnGroup:
    """A process group, and the one lasting reference to it: its threads end when that is dropped.

    They have to before the interpreter does: a thread that lets go of a tensor later than that
    aborts the process (pytorch#179291).
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._held = [group]
        self.close = weakref.finalize(self, _let_go, self._held)

    @property
    def now(self) -> dist.ProcessGroup:
        return self._held[0]


def _let_go(held: list[dist.ProcessGroup]) -> None:
    for group in held:
        with suppress(ValueError):  # it was destroyed before, with all others
            if dist.is_initialized():
                dist.destroy_process_group(group)
    held.clear()


@dataclass(frozen=True)
class Place:
    """Groups of our own, so that what we do with them disturbs nobody."""

    own_pipeline: OwnGroup
    own_everyone: OwnGroup
    own_replicas: OwnGroup | None  # None: there is one replica
    own_siblings: OwnGroup | None  # those that hold the same stage, and take turns; None: none does
    replica: int
    num_replicas: int
    speaks: bool  # of several processes with the same part of the same replica, one speaks

    @property
    def pipeline(self) -> dist.ProcessGroup:
        return self.own_pipeline.now

    @property
    def everyone(self) -> dist.ProcessGroup:
        return self.own_everyone.now

    @property
    def replicas(self) -> dist.ProcessGroup | None:
        return self.own_replicas.now if self.own_replicas else None

    @property
    def siblings(self) -> dist.ProcessGroup | None:
        return self.own_siblings.now if self.own_siblings else None

    def hang_up(self) -> None:
        """Close all lines, so that nobody goes on waiting at the other end, or at this one."""
        for own in self._own:
            if own.close.alive:
                hang_up(own.now)

    def close(self) -> None:
        for own in self._own:
            own.close()

    @property
    def _own(self) -> list[OwnGroup]:
        found = (self.own_pipeline, self.own_everyone, self.own_replicas, self.own_siblings)
        return [own for own in found if own is not None]


def hang_up(group: dist.ProcessGroup) -> None:
    """Nothing ends gloo's waiting for a message but a wait that is over: that closes the line."""
    try:
        peers = dist.get_process_group_ranks(group)
    except (KeyError, ValueError):
        return  # it was destroyed, with all others
    for peer in peers:
        if peer != dist.get_rank():
            with suppress(RuntimeError):  # it is over, or the line was closed before
                nothing = dist.irecv(torch.empty(1), peer, group, HANG_UP)
                assert nothing is not None  # this process is of the group
                nothing.wait(timedelta(milliseconds=1))


def find_place(
    mesh: DeviceMesh | None, num_ranks: int, limit: float, stages: Sequence[range] = ()
) -> Place:
    """Every process of the mesh calls this, and waits so many seconds for the others.

    `stages` are the ranks of each stage, if they take turns.
    """
    if not dist.is_initialized():
        raise ModelError(
            "backend is 'processes', but there is no process group: start the script with torchrun "
            "and call torch.distributed.init_process_group()"
        )
    grid = _grid(mesh)
    if grid.shape[1] != num_ranks:
        found = f"{grid.shape[1]} processes" if mesh is None else f"{grid.shape[1]} in mesh's 'pp'"
        raise ModelError(f"num_ranks is {num_ranks}, but there are {found}: use as many")
    if stages and grid.numel() > num_ranks:
        raise ModelError(
            f"mesh has {grid.numel()} processes for {num_ranks} ranks with replicas of stages, but "
            "replicas of single stages and of the whole pipeline do not go together: use one"
        )
    dp, _, tp = (int(index) for index in (grid == dist.get_rank()).nonzero()[0])
    return Place(
        _own_group([row for plane in grid.permute(0, 2, 1).tolist() for row in plane], limit),
        _own_group([grid.flatten().tolist()], limit),
        _own_group([row for plane in grid.permute(1, 2, 0).tolist() for row in plane], limit)
        if len(grid) > 1
        else None,
        _own_group([[int(grid[0, rank, 0]) for rank in ranks] for ranks in stages], limit)
        if stages
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


def _own_group(rows: list[list[int]], limit: float) -> OwnGroup:
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
    return OwnGroup(mine)
