"""Messages through shared memory: whole, in any order, never written over while they are in use."""

from __future__ import annotations

import gc
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from stageline.model.layers import Value
from stageline.runtime.backends.processes.messages.layout import MessageLayout
from stageline.runtime.backends.processes.messages.local_links import LocalLink, open_links
from stageline.runtime.backends.processes.messages.message_parts import RankLost
from stageline.runtime.backends.processes.messages.shapes import ValueSpec
from stageline.runtime.engine.minibatch import Message, MessageKey
from stageline.schedules.action import Action, Kind

X = Value(0, "x")
Ends = tuple[LocalLink, LocalLink]


@pytest.fixture
def ends() -> Iterator[Ends]:
    both = pair()
    yield both
    for end in both:
        end.close()


def pair(limit: float = 20.0) -> Ends:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return open_links({1: one}, limit)[1], open_links({0: other}, limit)[0]


def key(microbatch: int, minibatch: int = 0) -> MessageKey:
    return minibatch, Action(0, Kind.SEND_F, microbatch, peer=1)


def layout(tensor: Tensor, *, is_known: bool = True) -> MessageLayout:
    return MessageLayout(True, (X,), (ValueSpec.of(tensor),) if is_known else None)


def send(end: LocalLink, tensor: Tensor, microbatch: int, *, is_known: bool = True) -> None:
    message = Message({X: tensor}, 0.0)
    end.send(key(microbatch), layout(tensor, is_known=is_known), message)


def take(end: LocalLink, like: Tensor, microbatch: int, *, is_known: bool = True) -> Tensor:
    found = end.take(key(microbatch), layout(like, is_known=is_known)).contents[X]
    assert isinstance(found, Tensor)
    return found


def test_messages_are_found_by_their_names_in_whichever_order_they_come(ends: Ends) -> None:
    tensors = [torch.randn(3, 5) for _ in range(4)]
    for number, tensor in enumerate(tensors):
        send(ends[0], tensor, number)
    for number in (2, 0, 3, 1):
        assert torch.equal(take(ends[1], tensors[number], number), tensors[number])


def test_a_message_of_the_next_step_does_not_replace_one_of_the_same_name(ends: Ends) -> None:
    first, second = torch.randn(4), torch.randn(4)
    send(ends[0], first, 0)
    send(ends[0], second, 0)
    send(ends[0], torch.zeros(4), 1)
    take(ends[1], first, 1)  # reads past the others
    assert torch.equal(take(ends[1], first, 0), first)
    assert torch.equal(take(ends[1], first, 0), second)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(6, 4).t(),
        torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
        torch.randn(9, 9)[1:, 3:],
        torch.randn(5, 1).expand(5, 4),
        torch.empty(0, 3),
        torch.tensor(2.5),
        torch.arange(6),
        torch.randn(4, requires_grad=True),
    ],
    ids=["transposed", "channels last", "slice", "expanded", "empty", "number", "ints", "grad"],
)
@pytest.mark.parametrize("is_known", [True, False], ids=["known shape", "shape from data"])
def test_a_tensor_arrives_as_it_was(ends: Ends, tensor: Tensor, is_known: bool) -> None:
    send(ends[0], tensor, 0, is_known=is_known)
    found = take(ends[1], tensor, 0, is_known=is_known)
    assert torch.equal(found, tensor)
    assert found.requires_grad == tensor.requires_grad
    if tensor.numel():
        assert found.stride() == tensor.stride()
        assert found.data_ptr() % 64 == tensor.data_ptr() % 64


def test_memory_is_used_again_only_when_nothing_refers_to_the_message(ends: Ends) -> None:
    kept = []
    for number in range(20):
        tensor = torch.full((1000,), float(number))
        send(ends[0], tensor, number)
        found = take(ends[1], tensor, number)
        if number % 4 == 0:
            kept.append((found[500:501] * 1.0, found.view(10, 100)[3]))
    for number, (_, view) in enumerate(kept):
        assert torch.equal(view, torch.full((100,), 4.0 * number))
    assert ends[0].slots.num_made == len(kept) + 2  # and the two that were just used


def test_what_autograd_has_saved_is_not_written_over(ends: Ends) -> None:
    x = torch.randn(64)
    send(ends[0], x, 0)
    weight = torch.ones(64, requires_grad=True)
    loss = (take(ends[1], x, 0) * weight).sum()
    for number in range(1, 6):
        send(ends[0], torch.zeros(64), number)
        take(ends[1], x, number)
    loss.backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    assert torch.equal(weight.grad, x)


def test_a_message_may_be_changed_in_place_by_its_receiver(ends: Ends) -> None:
    x = torch.ones(8)
    send(ends[0], x, 0)
    take(ends[1], x, 0).mul_(3)
    assert torch.equal(x, torch.ones(8))


def test_ranks_that_send_thousands_to_each_other_before_they_read_do_not_block() -> None:
    both, count, x = pair(), 4000, torch.ones(1)

    def exchange(end: LocalLink, sums: list[float]) -> None:
        for number in range(count):
            send(end, x * number, number)
        sums.append(sum(float(take(end, x, number)) for number in range(count)))

    sums: list[float] = []
    threads = [threading.Thread(target=exchange, args=(end, sums), daemon=True) for end in both]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sums == [count * (count - 1) / 2] * 2
    for end in both:
        end.close()


def test_memory_of_sizes_that_are_not_needed_any_more_is_given_back(ends: Ends) -> None:
    sender, receiver = ends
    before = num_mapped()
    for number in range(60):
        x = torch.ones(1000 + 1000 * number)
        sender.begin_minibatch()
        send(sender, x, 0)
        take(receiver, x, 0)
    assert sender.slots.num_made > 20
    assert num_mapped() - before < 20  # at both ends together
    assert len(receiver.received.memories) < 12


def num_mapped() -> int:
    gc.collect()
    return Path("/proc/self/maps").read_text(encoding="utf-8").count("memfd:stageline")


def test_an_end_that_closes_ends_the_wait_of_the_other(ends: Ends) -> None:
    ends[0].close()
    with pytest.raises(RankLost, match="Connection closed by peer"):
        take(ends[1], torch.ones(1), 0)
    with pytest.raises(RankLost, match="Connection closed by peer"):
        send(ends[1], torch.ones(1), 0)


def test_a_wait_ends_when_another_thread_hangs_up(ends: Ends) -> None:
    timer = threading.Timer(0.1, ends[1].hang_up)
    timer.start()
    with pytest.raises(RankLost):
        take(ends[1], torch.ones(1), 0)
    timer.join()


def test_a_wait_ends_after_the_limit() -> None:
    both = pair(limit=0.2)
    with pytest.raises(RankLost, match="the time is over"):
        take(both[1], torch.ones(1), 0)
    for end in both:
        end.close()


def test_no_file_stays_open_for_a_message() -> None:
    before = num_files()
    both = pair()
    for number in range(30):
        send(both[0], torch.ones(100), number)
    held = [take(both[1], torch.ones(100), number) for number in range(20)]
    for end in both:
        end.close()
    assert num_files() == before
    assert all(torch.equal(each, torch.ones(100)) for each in held)  # memory outlives the link


def num_files() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208  a Path would open one more
