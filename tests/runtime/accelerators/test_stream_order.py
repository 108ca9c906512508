"""What is queued on which stream, and memory that is released while another stream may use it."""

from __future__ import annotations

from collections import Counter
from threading import Event
from typing import Any

import pytest
import torch
from tests.runtime.accelerators.watched import batches, chain, watched
from torch import Tensor, nn

import stageline as sl
from stageline.pipeline import session_of
from stageline.runtime.accelerators.checked_accelerator import CheckedAccelerator
from stageline.runtime.accelerators.simulation import Simulation
from stageline.runtime.devices import accelerators_of
from stageline.runtime.exactness.strided_copy import misalignment
from stageline.runtime.stage.offload import HostMemory

PATIENCE = 60.0  # seconds until a test gives up


def simulation_of(pipe: sl.Pipeline) -> Simulation:
    first = session_of(pipe).assembly.layout.accelerators[0]
    assert isinstance(first, CheckedAccelerator)
    return first.simulation


def queued_on(pipe: sl.Pipeline) -> Counter[str]:
    """Return how much was queued on the streams of each name."""
    found = Counter[str]()
    for stream in simulation_of(pipe).streams:
        found[stream.name] += stream.num_queued
    return found


def test_ranks_and_the_copies_between_them_have_streams_of_their_own() -> None:
    with watched(chain(), watches=False, num_ranks=3) as pipe:
        pipe.step(*batches()[0])
        found = queued_on(pipe)
        streams = Counter(stream.name for stream in simulation_of(pipe).streams)
    assert found.pop("the caller's stream") == 0
    directions = [(0, 1), (1, 0), (1, 2), (2, 1)]
    copies = [f"copies from rank {source} to rank {target}" for source, target in directions]
    assert set(found) == {*(f"compute of rank {rank}" for rank in range(3)), *copies}
    assert all(streams[name] == 2 for name in copies)  # one on each device
    # 4 micro-batches: memory on the stream of the receiver, and a copy on that of the sender
    assert {s.num_queued for s in simulation_of(pipe).streams if s.name in copies} == {4}


def test_ranks_on_one_device_copy_nothing() -> None:
    with watched(chain(), watches=False, devices=["cpu", "cpu"]) as pipe:
        pipe.step(*batches()[0])
        assert set(queued_on(pipe)) == {
            "the caller's stream",
            "compute of rank 0",
            "compute of rank 1",
        }


def test_offloaded_activations_travel_on_a_stream_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streams: dict[str, set[str]] = {"upload": set(), "download": set()}
    for name in ("upload", "download"):
        copy = getattr(CheckedAccelerator, name)

        def noting(self: Any, tensor: Tensor, name: str = name, copy: Any = copy) -> Tensor:
            streams[name].add(self.simulation.current(self).name)
            made: Tensor = copy(self, tensor)
            return made

        monkeypatch.setattr(CheckedAccelerator, name, noting)
    # batches that the caller made on a device need no upload
    with watched(chain(), schedule="gpipe", options={"offload": True}) as pipe:
        pipe.step(*batches()[0])
    assert streams["download"] == {"offload of stage 0", "offload of stage 1"}
    assert streams["upload"] == streams["download"]


def test_what_was_offloaded_has_its_strides_and_its_alignment_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A copy in page-locked memory is dense: with gaps, the host would wait for it."""

    def dense(_: Any, tensor: Tensor) -> Tensor:
        return tensor.clone(memory_format=torch.contiguous_format)

    monkeypatch.setattr(CheckedAccelerator, "download", dense)
    (device,) = accelerators_of([None], simulated=True)
    assert device is not None
    memory, original = HostMemory(device, 0), torch.arange(24.0).view(4, 6)[:, 1:4]
    with device.rank_thread():
        found = memory.wait(memory.copy_in(memory.copy_out(original)))
    assert torch.equal(found, original)
    assert found.stride() == original.stride()
    assert misalignment(found) == misalignment(original)


class Waits(nn.Module):
    """Doubles its input; at one of its calls, waits before for an event of the test."""

    def __init__(self, at_call: int, opened: Event) -> None:
        super().__init__()
        self.at_call, self.opened, self.num_calls = at_call, opened, 0

    def forward(self, x: Tensor) -> Tensor:
        if self.num_calls == self.at_call:
            assert self.opened.wait(PATIENCE)
        self.num_calls += 1
        return x * 2


class Tells(nn.Module):
    """Doubles its input, and says that it has been called twice."""

    def __init__(self, is_second: Event) -> None:
        super().__init__()
        self.is_second, self.num_calls = is_second, 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        if self.num_calls == 2:
            self.is_second.set()
        return x * 2


@pytest.mark.parametrize("devices", [None, ["cpu", "cpu"]])
def test_a_message_is_kept_for_the_stream_of_its_receiver(devices: list[str] | None) -> None:
    """Rank 0 sends its third message when rank 1 has let go of the first."""
    is_second = Event()
    model = nn.Sequential(Waits(2, is_second), Tells(is_second))
    with watched(model, devices=devices) as pipe:
        pipe.eval()
        assert pipe(batches()[0][0]).shape == (9, 6)


def test_a_message_is_kept_until_it_has_been_copied() -> None:
    """Rank 1 lets go of its gradients as soon as they are sent."""
    with watched(chain(), schedule="gpipe") as pipe:
        pipe.step(*batches()[0])


@pytest.mark.parametrize("read", ["loss", "update_norms"])
def test_results_of_a_stream_are_the_callers_while_ranks_go_on(read: str) -> None:
    """The caller reads a result and lets go of it while the last rank is inside a mini-batch."""
    opened = Event()
    last = Waits(0, opened)
    model = nn.Sequential(*chain(), last)
    options: dict[str, Any] = {"schedule": "pipedream", "num_microbatches": 1}
    with watched(model, optimizer_fn=lambda p: torch.optim.SGD(p, 0.01), **options) as pipe:
        last.at_call = pipe.ahead
        results = pipe.run(batches(6))
        result = next(results)
        found = getattr(result, read)
        del result, found
        opened.set()
        assert len(list(results)) == 5
