"""Programs of two streams, written by hand: where an event or a keep-alive is missing, an error."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from stageline.errors import StreamOrderError
from stageline.runtime.accelerators.accelerator import Accelerator
from stageline.runtime.accelerators.checked_accelerator import CheckedAccelerator
from stageline.runtime.devices import accelerators_of


def simulated(num_ranks: int = 1) -> list[Accelerator]:
    return [each for each in accelerators_of([None] * num_ranks, simulated=True) if each]


@pytest.fixture
def device() -> Iterator[Accelerator]:
    (accelerator,) = simulated()
    with accelerator.rank_thread(), accelerator.queueing_on(accelerator.new_stream("compute")):
        yield accelerator


class TwoStreams:
    """The stream of a test, which is current, and a side stream."""

    def __init__(self, device: Accelerator) -> None:
        self.device, self.side = device, device.new_stream("copies")

    def order_side_after_compute(self) -> None:
        event = self.device.record_event()
        with self.device.queueing_on(self.side):
            self.device.wait_event(event)

    def order_compute_after_side(self) -> None:
        with self.device.queueing_on(self.side):
            event = self.device.record_event()
        self.device.wait_event(event)


@pytest.fixture
def streams(device: Accelerator) -> TwoStreams:
    return TwoStreams(device)


def test_a_read_that_waits_for_the_write_is_right(streams: TwoStreams) -> None:
    x = torch.ones(4)
    streams.order_side_after_compute()
    with streams.device.queueing_on(streams.side):
        y = x + 1
        streams.device.keep_alive(x)
    streams.order_compute_after_side()
    assert y.sum() == 8.0


def test_a_read_that_does_not_wait_for_the_write_is_an_error_with_both_places(
    streams: TwoStreams,
) -> None:
    x = torch.ones(4).mul_(2)
    with (
        streams.device.queueing_on(streams.side),
        pytest.raises(StreamOrderError) as caught,
    ):
        x.sum()
    text = str(caught.value)
    assert "read on copies by aten::sum at " in text
    assert "written on compute by aten::mul_ at " in text
    assert text.count("test_checked_accelerator.py:") == 2


def test_a_write_over_what_another_stream_reads_is_an_error(streams: TwoStreams) -> None:
    x = torch.ones(4)
    streams.order_side_after_compute()
    with streams.device.queueing_on(streams.side):
        x.sum()
    with pytest.raises(StreamOrderError, match=r"written on compute .*\n.* read on copies"):
        x.add_(1)


def test_two_writes_without_an_order_are_an_error(streams: TwoStreams) -> None:
    x = torch.ones(4)
    streams.order_side_after_compute()
    with streams.device.queueing_on(streams.side):
        x.add_(1)
    with pytest.raises(StreamOrderError, match=r"written on compute .*\n.* written on copies"):
        x.zero_()


def test_two_reads_need_no_order(streams: TwoStreams) -> None:
    x = torch.ones(4)
    streams.order_side_after_compute()
    with streams.device.queueing_on(streams.side):
        x.sum()
    x.sum()


def test_views_are_in_the_memory_of_their_base(streams: TwoStreams) -> None:
    x = torch.ones(4, 4)
    row = x.t()[1].view(2, 2)
    with streams.device.queueing_on(streams.side), pytest.raises(StreamOrderError):
        row.add_(1)


def test_making_a_view_uses_no_memory(streams: TwoStreams) -> None:
    x = torch.ones(4, 4)
    with streams.device.queueing_on(streams.side):
        assert x.view(2, 8).t().detach().shape == (8, 2)


def test_memory_that_is_released_may_be_reused_while_another_stream_reads_it(
    streams: TwoStreams,
) -> None:
    x = torch.ones(4)
    streams.order_side_after_compute()
    with streams.device.queueing_on(streams.side):
        x.sum()
    del x
    with pytest.raises(StreamOrderError, match=r"released and may be reused by .*\n.* on copies"):
        torch.ones(4)


@pytest.mark.parametrize("keeps", [True, False])
def test_memory_is_not_reused_if_it_is_kept_alive_or_the_owner_has_waited(
    streams: TwoStreams, keeps: bool
) -> None:
    x = torch.ones(4)
    streams.order_side_after_compute()
    with streams.device.queueing_on(streams.side):
        x.sum()
        if keeps:
            streams.device.keep_alive(x)
    if not keeps:
        streams.order_compute_after_side()
    del x
    torch.ones(4)


def test_a_view_keeps_memory_from_being_released(streams: TwoStreams) -> None:
    x = torch.ones(4)
    part = x[1:]
    streams.order_side_after_compute()
    with streams.device.queueing_on(streams.side):
        x.sum()
    del x
    torch.ones(4)
    del part
    with pytest.raises(StreamOrderError, match="released"):
        torch.ones(4)


def test_memory_that_was_there_before_belongs_to_nobody() -> None:
    x = torch.ones(4)
    (device,) = simulated()
    with device.rank_thread(), device.queueing_on(device.new_stream("compute")):
        x.add_(1)
        with device.queueing_on(device.new_stream("copies")), pytest.raises(StreamOrderError):
            x.add_(1)


def test_lists_out_arguments_and_running_statistics_are_seen(streams: TwoStreams) -> None:
    out, norm = torch.empty(4), nn.BatchNorm1d(4)
    parts = [torch.ones(4), torch.ones(4)]
    torch.add(parts[0], 1, out=out)
    norm(torch.ones(3, 4))
    assert isinstance(norm.running_mean, Tensor)
    with streams.device.queueing_on(streams.side):
        for use in (out.sum, norm.running_mean.sum, lambda: torch._foreach_add_(parts, 1.0)):
            with pytest.raises(StreamOrderError):
                use()


def test_a_backward_runs_on_the_stream_of_its_caller(streams: TwoStreams) -> None:
    weight = torch.ones(4, requires_grad=True)
    loss = (weight * 2).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    with streams.device.queueing_on(streams.side), pytest.raises(StreamOrderError):
        weight.grad.sum()


def test_a_copy_between_devices_waits_for_both() -> None:
    first, second = simulated(2)
    compute = [first.new_stream("compute of rank 0"), second.new_stream("compute of rank 1")]
    with first.rank_thread(), second.queueing_on(compute[1]), first.queueing_on(compute[0]):
        x = torch.ones(4)
        copy = second.copy_from(x, first)
        with second.queueing_on(compute[1]):
            assert copy.sum() == 4.0
        x.add_(1)  # behind the copy, on the same stream
        with pytest.raises(StreamOrderError):
            copy.add_(1)


def test_an_operation_of_a_channel_belongs_on_its_stream(streams: TwoStreams) -> None:
    assert isinstance(streams.device, CheckedAccelerator)
    simulation = streams.device.simulation
    with pytest.raises(StreamOrderError) as caught:
        simulation.run_in_channel(streams.side, "a send", [torch.ones(4)], [])
    text = str(caught.value)
    assert "a send at " in text
    assert "is queued on compute" in text
    assert text.endswith("queue it on the stream of copies")


def test_an_error_says_what_the_rank_did() -> None:
    (device,) = simulated()
    x = torch.ones(4)
    with device.rank_thread(lambda: "2F3"), device.queueing_on(device.new_stream("compute")):
        x.add_(1)
        with (
            device.queueing_on(device.new_stream("copies")),
            pytest.raises(StreamOrderError, match="during 2F3"),
        ):
            x.add_(1)
