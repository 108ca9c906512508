"""Times by a device's clock: fakes whose clocks begin elsewhere, and run at another rate."""

from __future__ import annotations

import struct
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stageline import pipeline_setup
from stageline.pipeline import Pipeline
from stageline.runtime.accelerators import device_clock
from stageline.runtime.accelerators.checked_accelerator import CheckedAccelerator
from stageline.runtime.accelerators.device_clock import DeviceClock
from stageline.runtime.accelerators.simulation import Simulation
from stageline.runtime.accelerators.torch_accelerator import TorchAccelerator
from stageline.runtime.engine.recorder import Recorder
from stageline.schedules.action import Kind

SLEEP = 0.02


class OtherClock(CheckedAccelerator):
    """A device whose time is `rate` of the host's and `offset`, and as exact as CUDA states it."""

    def __init__(self, rate: float, offset: float, simulation: Simulation | None = None) -> None:
        super().__init__("a device", simulation or Simulation())
        self.rate, self.offset = rate, offset

    def record_time(self) -> float:
        return self.offset + self.rate * time.perf_counter()

    def seconds_between(self, earlier: float, later: float) -> float:
        return _float32(1e3 * (later - earlier)) / 1e3


def _float32(number: float) -> float:
    found: float = struct.unpack("f", struct.pack("f", number))[0]
    return found


class HostClock:
    """A `perf_counter` that moves when it is told to, and 10 µs when it is read."""

    def __init__(self) -> None:
        self.now = 5000.0

    def __call__(self) -> float:
        self.now += 1e-5
        return self.now


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> HostClock:
    clock = HostClock()
    monkeypatch.setattr(time, "perf_counter", clock)
    monkeypatch.setattr(device_clock, "perf_counter", clock)
    return clock


@pytest.mark.parametrize("rate", [1.0, 1.0002, 0.5, 30.0])
def test_a_drifting_clock_is_mapped_to_the_hosts(host: HostClock, rate: float) -> None:
    device = OtherClock(rate, offset=-123.0)
    clock = DeviceClock(device)
    marks = []
    for seconds in (1e-6, 1e-3, 1.0, 0.25, 2.0, 1e-3):
        host.now += seconds
        marks.append((device.record_time(), host.now))
    clock.stop()
    found = [clock.host_time(event) for event, _ in marks]
    assert found == pytest.approx([at for _, at in marks], abs=clock.error + 1e-6)
    assert clock.error == pytest.approx(1e-5)  # half of the two readings around an event


def test_times_at_the_end_of_an_hour_are_as_exact_as_at_its_beginning(host: HostClock) -> None:
    device = OtherClock(1.0001, offset=7.0)
    clock = DeviceClock(device)
    host.now += 3600.0  # of which a float of milliseconds has steps of 0.25 ms
    first, second = device.record_time(), device.record_time()
    clock.stop()
    assert clock.host_time(second) - clock.host_time(first) == pytest.approx(1e-5, abs=1e-6)


def test_the_wait_that_was_shortest_counts(
    host: HostClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = iter([0.3, 0.2, 2e-6, 0.5, 0.1, 0.4])
    device = OtherClock(1.0, offset=0.0)

    def synchronize() -> None:
        host.now += next(waits, 0.0)

    clock = DeviceClock(device)
    monkeypatch.setattr(device, "synchronize", synchronize)
    clock.stop()
    assert clock.last.error == pytest.approx(1.1e-5)


class Sleeps(nn.Module):
    """Takes a time that is known, forward and backward, and notes when its forward ran."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.ran: list[tuple[float, float]] = []

    def forward(self, x: Tensor) -> Tensor:
        began = time.perf_counter()
        time.sleep(SLEEP)
        self.ran.append((began, time.perf_counter()))
        return x * self.weight


def traced(
    monkeypatch: pytest.MonkeyPatch, kind: type[OtherClock] = OtherClock, backend: str = "threads"
) -> tuple[Recorder, list[Sleeps]]:
    """Trace the second step of a pipeline whose ranks have devices with clocks of their own."""
    simulation = Simulation()
    devices = kind(0.5, 1000.0, simulation), kind(3.0, -1000.0, simulation)
    monkeypatch.setattr(pipeline_setup, "accelerators_of", lambda *_, **__: devices)
    layers = [Sleeps(), Sleeps()]
    x = torch.ones(4, 1)
    with Pipeline(
        nn.Sequential(*layers),
        nn.functional.mse_loss,
        num_ranks=2,
        num_microbatches=2,
        schedule="gpipe",
        backend=backend,
    ) as pipe:
        pipe.step(x, x)
        with pipe.trace() as trace:
            for layer in layers:
                layer.ran.clear()
            pipe.step(x, x)
    return trace, layers


@pytest.mark.parametrize("backend", ["threads", "serial"])
def test_a_trace_of_devices_has_the_times_at_which_layers_ran(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, layers = traced(monkeypatch, backend=backend)
    assert trace.recording is not None
    for rank, layer in enumerate(layers):
        forwards = [t for t in trace.recording.times[rank] if t.action.kind is Kind.F]
        for found, (start, end) in zip(forwards, layer.ran, strict=True):
            assert found.start <= start + 1e-3
            assert end <= found.end + 1e-3
        assert forwards[0].end <= forwards[1].start


def test_idle_time_of_devices_is_attributed_as_that_of_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trace, _ = traced(monkeypatch)
    timeline = trace.timeline
    for busy, idle in zip(timeline.busy, timeline.idle, strict=True):
        # each rank waits for the other: the second at first, the first at last
        assert idle.bubble + idle.imbalance > 0.5e3 * SLEEP
        assert idle.transfer > 0.0
        assert busy + sum(idle) == pytest.approx(timeline.makespan, rel=0.01)


def test_no_clock_is_read_but_before_and_after_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    running, read = [False], []
    step = Pipeline.step

    def marked(self: Pipeline, *args: Any) -> Any:
        running[0] = True
        try:
            return step(self, *args)
        finally:
            running[0] = False

    class Synchronized(OtherClock):
        def synchronize(self) -> None:
            read.append(running[0])

    monkeypatch.setattr(Pipeline, "step", marked)
    traced(monkeypatch, Synchronized)
    assert read
    assert not any(read)


def test_a_real_device_is_asked_for_events_with_times_on_its_current_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[object] = []

    class FakeEvent:
        def __init__(self, device: torch.device, *, enable_timing: bool) -> None:
            calls.append((str(device), enable_timing))

        def record(self, stream: str) -> None:
            calls.append(stream)

        def elapsed_time(self, other: FakeEvent) -> float:
            assert isinstance(other, FakeEvent)
            return 1500.0  # ms

    monkeypatch.setattr(torch, "Event", FakeEvent)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: calls.append(device.index))
    device = TorchAccelerator(torch.device("cuda", 1))
    earlier = device.record_time()
    assert calls == [("cuda:1", True), "stream of cuda:1"]
    assert device.seconds_between(earlier, device.record_time()) == 1.5
    device.synchronize()
    assert calls[-1] == 1
