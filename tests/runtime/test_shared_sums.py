"""Sums of gradients over replicas of one machine: the same bits everywhere, in the same order."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import reduce
from itertools import combinations

import pytest
import torch
from torch import Tensor, nn

from stageline.runtime.backends.processes import shared_sums
from stageline.runtime.backends.processes.messages.local_links import LocalLink, open_links
from stageline.runtime.backends.processes.messages.message_parts import RankLost
from stageline.runtime.backends.processes.shared_sums import SharedSums, pieces_of

SHAPES = ((3, 5), (7,), (), (2, 3, 4, 4))
Gradients = list[Tensor | None]


@contextmanager
def replicas(count: int) -> Iterator[list[SharedSums]]:
    sockets: list[dict[int, socket.socket]] = [{} for _ in range(count)]
    for a, b in combinations(range(count), 2):
        sockets[a][b], sockets[b][a] = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    links: list[dict[int, LocalLink]] = [open_links(ends, 20.0) for ends in sockets]
    yield [SharedSums(mine, replica) for replica, mine in enumerate(links)]
    for mine in links:
        for link in mine.values():
            link.close()


def parameters(gradients: Gradients) -> list[nn.Parameter]:
    found = []
    for shape, gradient in zip(SHAPES, gradients, strict=True):
        parameter = nn.Parameter(torch.zeros(shape))
        parameter.grad = None if gradient is None else gradient.clone()
        found.append(parameter)
    return found


def summed(each: Sequence[SharedSums], given: Sequence[Gradients]) -> list[Gradients]:
    """Sum in two buckets, finished in another order than started, on all replicas at once."""

    def run(sums: SharedSums, gradients: Gradients) -> Gradients:
        mine = parameters(gradients)
        finishes: list[Callable[[], None]] = [sums.start(mine[:3]), sums.start(mine[3:])]
        for finish in reversed(finishes):
            finish()
        return [parameter.grad for parameter in mine]

    with ThreadPoolExecutor(len(each)) as pool:
        return list(pool.map(run, each, given))


def in_order(given: Sequence[Gradients]) -> Gradients:
    columns = [[g for g in column if g is not None] for column in zip(*given, strict=True)]
    return [reduce(torch.add, column) if column else None for column in columns]


def equal(one: Gradients, other: Gradients) -> bool:
    return all(
        (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("piece", [1, 40, 2**22], ids=["by row", "by rows", "at once"])
@pytest.mark.parametrize("in_flight", [1, 2, 100])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_all_replicas_have_the_sum_in_the_order_of_replicas(
    count: int, in_flight: int, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_sums, "IN_FLIGHT", in_flight)
    monkeypatch.setattr(shared_sums, "PIECE", piece)
    torch.manual_seed(count)
    with replicas(count) as each:
        for _ in range(3):  # memory is used again
            given: list[Gradients] = [
                [torch.randn(shape) for shape in SHAPES] for _ in range(count)
            ]
            expected = in_order(given)
            for found in summed(each, given):
                assert equal(found, expected)


@pytest.mark.parametrize("piece", [1, 40, 2**22], ids=["by row", "by rows", "at once"])
def test_a_gradient_that_some_replicas_lack_counts_as_zero_and_one_that_all_lack_stays_away(
    piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_sums, "PIECE", piece)
    torch.manual_seed(0)
    given: list[Gradients] = [
        [torch.randn(shape) if (replica + n) % 3 else None for n, shape in enumerate(SHAPES)]
        for replica in range(3)
    ]
    for gradients in given:
        gradients[1] = None
    with replicas(3) as each:
        expected = in_order(given)
        assert expected[1] is None
        for found in summed(each, given):
            assert equal(found, expected)


def test_pieces_have_whole_rows_and_a_limited_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_sums, "PIECE", 48)
    shapes = ((3, 5), (0, 4), (), (2, 20), (7,))  # rows of 20, 16, 4, 80 and 4 bytes
    found = pieces_of([nn.Parameter(torch.zeros(shape)) for shape in shapes])
    assert [[(tuple(p.shape), r.start, r.stop) for p, r in piece] for piece in found] == [
        [((3, 5), 0, 2)],
        [((3, 5), 2, 3), ((), 0, 1)],
        [((2, 20), 0, 1)],
        [((2, 20), 1, 2)],
        [((7,), 0, 7)],
    ]


def test_gradients_keep_their_strides() -> None:
    weight = torch.randn(4, 3, 3, 3).contiguous(memory_format=torch.channels_last)
    with replicas(2) as each:

        def run(sums: SharedSums) -> Tensor:
            parameter = nn.Parameter(weight.clone(memory_format=torch.preserve_format))
            parameter.grad = torch.ones(4, 3, 3, 3)  # contiguous, unlike the weight
            sums.start([parameter])()
            assert parameter.grad is not None
            return parameter.grad

        with ThreadPoolExecutor(2) as pool:
            for found in pool.map(run, each):
                assert torch.equal(found, torch.full((4, 3, 3, 3), 2.0))
                assert found.is_contiguous()


def test_a_replica_that_is_gone_ends_the_wait() -> None:
    with replicas(2) as (sums, other):
        parameter = nn.Parameter(torch.zeros(3))
        parameter.grad = torch.ones(3)
        finish = sums.start([parameter])
        other.links[0].hang_up()
        with pytest.raises(RankLost):
            finish()
