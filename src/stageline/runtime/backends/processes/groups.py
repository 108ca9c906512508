"""Where this process stands among all: in its pipeline, beside its replicas, in its tensor group.

dp = 2, pp = 3      replica 0 │ rank 0  rank 1  rank 2       a row is a pipeline,
                    replica 1 │ rank 0  rank 1  rank 2       a column holds the same stages
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from hashlib import blake2b

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from stageline.errors import StageError
from stageline.runtime.accelerators.accelerator import Accelerator
from stageline.runtime.backends.backend import Group
from stageline.runtime.backends.processes.failure_watch import (
    CHECKPOINT_TIMEOUT,
    START_UP_TIMEOUT,
    FailureWatch,
)
from stageline.runtime.backends.processes.heartbeats import call_with_timeout, store_unreachable
from stageline.runtime.backends.processes.messages.local_links import LocalLink, open_links
from stageline.runtime.backends.processes.messages.neighbours import connect_neighbours
from stageline.runtime.backends.processes.process_grid import checked_grid, process_name
from stageline.runtime.backends.processes.rendezvous import warn_if_reachable
from stageline.torch_private import default_store, set_group_timeout

HANG_UP = 1  # tag of no message
CONNECT = 30.0  # seconds, at least, for processes that are all there to connect to each other
SLACK = 60.0  # seconds by which torch's own limit is behind that of the watch


class OwnedGroup:
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
class ProcessGroups:
    """Groups of our own, so that what we do with them disturbs nobody."""

    watch: FailureWatch
    opened: list[OwnedGroup]  # all of them
    near: list[LocalLink]  # all links, of both sorts below
    lines: list[list[int]]  # the global ranks of each pipeline, in order
    own_pipeline: OwnedGroup
    own_everyone: OwnedGroup
    own_saves: OwnedGroup  # for the thread of a save under way, and for nobody else
    own_replicas: OwnedGroup | None  # None: there is one replica
    own_siblings: OwnedGroup | None  # ranks that hold the same stage, if any do
    links: Mapping[int, LocalLink]  # to ranks of this pipeline on this machine
    replica_links: Mapping[int, LocalLink]  # to replicas on this machine, of the same stages
    replica: int
    num_replicas: int
    is_first_part: bool  # the first of several processes that hold parts of the same tensors

    @property
    def pipeline(self) -> dist.ProcessGroup:
        return self.own_pipeline.now

    @property
    def everyone(self) -> dist.ProcessGroup:
        return self.own_everyone.now

    def of(self, group: Group) -> dist.ProcessGroup | None:
        """Return a group; None if this process is alone in it."""
        own = {
            Group.PIPELINE: self.own_pipeline,
            Group.REPLICAS: self.own_replicas,
            Group.SIBLINGS: self.own_siblings,
            Group.EVERYONE: self.own_everyone,
            Group.SAVES: self.own_saves,
        }[group]
        return own.now if own is not None else None

    def hang_up(self) -> None:
        """Close all connections, so that nobody goes on waiting at either end."""
        hang_up(self.opened, self.near)

    def close(self) -> None:
        for link in self.near:
            link.close()
        for own in self.opened:
            own.close()


def backends_of(accelerators: Sequence[Accelerator | None]) -> str:
    """Return the backends of groups for ranks with these accelerators.

    Gloo is for control, and for what is in host memory; tensors of a device take its own.
    """
    kinds = sorted({each.device.type for each in accelerators if each is not None} - {"cpu"})
    own = [f"{kind}:{dist.get_default_backend_for_device(kind)}" for kind in kinds]
    return ",".join(["cpu:gloo", *own]) if own else "gloo"


def hang_up(opened: Sequence[OwnedGroup], links: Iterable[LocalLink]) -> None:
    """Close connections, so that nobody goes on waiting at either end."""
    for link in links:
        link.hang_up()
    for own in opened:
        if own.close.alive:
            _hang_up(own.now)


def _hang_up(group: dist.ProcessGroup) -> None:
    """Close a group's connections, by a wait that times out: nothing else ends gloo's waits."""
    try:
        peers = dist.get_process_group_ranks(group)
    except (KeyError, ValueError):
        return  # it was destroyed, with all others
    group.abort()  # what is queued on a device ends; gloo does nothing
    for peer in peers:
        if peer != dist.get_rank():
            with suppress(RuntimeError):  # it is over, or the line was closed before
                nothing = dist.irecv(torch.empty(1), peer, group, HANG_UP)
                assert nothing is not None  # this process is of the group
                nothing.wait(timedelta(milliseconds=1))


def connect(
    mesh: DeviceMesh | None,
    num_ranks: int,
    limit: float,
    stages: Sequence[range] = (),
    *,
    backend: str = "gloo",
    shares_memory: bool = True,
) -> ProcessGroups:
    """Find this process among those of the mesh, and connect it to them; all of them call it.

    `limit` is how many seconds a rank waits for others, once all are there. `stages` are
    the ranks of each stage, if they take turns. `backend` has gloo, and that of the ranks' devices.
    If `shares_memory`, messages between ranks on one machine go through memory.
    """
    grid = checked_grid(mesh, num_ranks, has_siblings=bool(stages))
    opened: list[OwnedGroup] = []
    near: list[LocalLink] = []
    watch = _assembled(grid, limit, lambda: hang_up(opened, near))
    making = _Making(watch, limit, backend, shares_memory, opened, near)
    try:
        return _groups(grid, making, stages)
    except StageError:
        watch.leave()
        raise
    except (OSError, RuntimeError) as error:
        message = watch.cause_of(f"{watch.name} could not connect to it when a pipeline was made")
        watch.leave()
        raise StageError(f"{message}\n  {error}") from None


@dataclass(frozen=True)
class _Making:
    """Makes groups and links, which all processes make in the same order, and keeps them."""

    watch: FailureWatch
    limit: float
    backend: str
    shares_memory: bool
    opened: list[OwnedGroup]
    near: list[LocalLink]

    def group(self, rows: list[list[int]], backend: str) -> OwnedGroup:
        connect = timedelta(seconds=max(self.limit, CONNECT))
        waits = timedelta(seconds=_longest_wait(self.limit))
        made = self.watch.call("connections", lambda: own_group(rows, connect, waits, backend))
        assert made is not None  # each process is in one of the rows
        self.opened.append(made)
        return made

    def links(self, ranks: list[int], everyone: OwnedGroup, limit: float) -> dict[int, LocalLink]:
        shares = self.shares_memory
        sockets = self.watch.call(
            "connections", lambda: connect_neighbours(ranks, everyone.now, shares_memory=shares)
        )
        made = open_links(sockets, limit)
        self.near.extend(made.values())
        return made


def _groups(grid: torch.Tensor, making: _Making, stages: Sequence[range]) -> ProcessGroups:
    dp, pp, tp = (int(index) for index in (grid == dist.get_rank()).nonzero()[0])
    limit, all_ranks = making.limit, [grid.flatten().tolist()]
    siblings = [[int(grid[0, rank, 0]) for rank in ranks] for ranks in stages]
    has_replicas = len(grid) > 1
    backend = making.backend
    lines = _lines(grid.permute(0, 2, 1))
    everyone = making.group(all_ranks, backend)
    line, column = grid[dp, :, tp].tolist(), grid[:, pp, tp].tolist()
    return ProcessGroups(
        making.watch,
        making.opened,
        making.near,
        lines,
        making.group(lines, backend),
        everyone,
        making.group(all_ranks, "gloo"),
        making.group(_lines(grid.permute(1, 2, 0)), backend) if has_replicas else None,
        making.group(siblings, backend) if stages else None,
        making.links(line, everyone, limit),
        making.links(column, everyone, _longest_wait(limit)) if has_replicas else {},
        dp,
        len(grid),
        tp == 0,
    )


def _lines(grid: torch.Tensor) -> list[list[int]]:
    """Return the lines of a grid along its last dimension."""
    return [line for plane in grid.tolist() for line in plane]


def _assembled(grid: torch.Tensor, limit: float, cancel_waits: Callable[[], None]) -> FailureWatch:
    """Return a watch over all processes of the mesh, when all of them are there."""
    names = [process_name(index, grid) for index in range(grid.numel())]
    ranks = grid.flatten().tolist()
    store = call_with_timeout(max(START_UP_TIMEOUT, limit), lambda: _store_for(ranks))
    if store is None:
        raise StageError(f"no pipeline could be made: {store_unreachable(names[0])}")
    if dist.get_rank() == 0:  # on whose machine it is
        warn_if_reachable(store)
    watch = FailureWatch(store, names, ranks.index(dist.get_rank()), limit, cancel_waits)
    try:
        watch.start()
    except TimeoutError as error:
        watch.leave()
        verb = "have" if "," in str(error) else "has"
        message = (
            f"{error} {verb} not made the pipeline within {max(START_UP_TIMEOUT, limit):g} s of "
            f"{watch.name}: look for what ended a process before that, or for calls that not all "
            "ranks make"
        )
        raise StageError(message) from None
    if watch.failure is not None or not watch.is_store_reachable:
        message = watch.failure or watch.report_failure(f"{watch.name} could not reach the others")
        watch.leave()
        raise StageError(message)
    return watch


def _store_for(ranks: Sequence[int]) -> dist.distributed_c10d.Store:
    """Return a store for each pipeline, and all of its replicas: a failure concerns them all.

    It has a connection of its own: one that waits for a key, as torch does when groups are made,
    answers nobody else.
    """
    whole = default_store().clone()  # type: ignore[attr-defined]  # torch's stub lacks it
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # a store may outlive processes
    who = blake2b(repr(list(ranks)).encode(), digest_size=8).hexdigest()
    store = dist.distributed_c10d.PrefixStore(f"stageline/{attempt}/{who}", whole)
    made = store.add(f"made/{dist.get_rank()}", 1)
    return dist.distributed_c10d.PrefixStore(f"pipeline/{made}", store)


def own_group(
    rows: Sequence[Sequence[int]], connect: timedelta, waits: timedelta, backend: str
) -> OwnedGroup | None:
    """Make a group for each row, as all processes do in the same order; return this process's one.

    `connect` limits how long members wait for each other now, and `waits` how long they do later.
    """
    groups = [dist.new_group([*row], timeout=connect, backend=backend) for row in rows]
    here = [g for g, row in zip(groups, rows, strict=True) if dist.get_rank() in row]
    if not here:
        return None
    (mine,) = here
    assert isinstance(mine, dist.ProcessGroup)  # those that this is not in are no groups here
    set_group_timeout(mine, waits)
    return OwnedGroup(mine)


def _longest_wait(limit: float) -> float:
    """Return a limit so long that the watch, which knows which ranks are busy, ends waits first."""
    return max(limit, CHECKPOINT_TIMEOUT, START_UP_TIMEOUT) + SLACK
