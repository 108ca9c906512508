"""Time and memory of devices: by their own events and counters, not the host's."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from stageline.errors import PlanError
from stageline.planning.profiling.profile import profile
from stageline.planning.profiling.profiled_model import ProfiledModel
from stageline.runtime.accelerators import measured_devices
from stageline.runtime.accelerators.measured_devices import (
    cuda_waits,
    device_memory,
    device_name,
    device_of,
    peak_bytes,
    timed,
)
from stageline.training.metrics import peak_memory

XPU = torch.device("xpu", 1)


class FakeDevice:
    """A device whose queue takes 2 s more with each piece of work, and notes what it is asked."""

    calls: list[str] = []  # noqa: RUF012  of the only one
    queued = 0.0

    def __init__(self, device: torch.device) -> None:
        assert device == XPU

    def synchronize(self) -> None:
        self.calls.append("synchronize")

    def record_time(self) -> float:
        self.calls.append("record")
        return FakeDevice.queued

    def seconds_between(self, earlier: float, later: float) -> float:
        assert self.calls[-1] == "synchronize"  # else the events may not have occurred
        return later - earlier


def queue() -> str:
    FakeDevice.calls.append("work")
    FakeDevice.queued += 2.0
    return "result"


def test_work_on_a_device_is_timed_by_its_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_devices, "TorchAccelerator", FakeDevice)
    FakeDevice.calls.clear()
    assert timed(queue, XPU) == ("result", 2.0)
    assert FakeDevice.calls == ["synchronize", "record", "work", "record", "synchronize"]


@pytest.mark.parametrize("device", [None, torch.device("cpu")])
def test_work_on_the_cpu_is_timed_by_the_host(device: torch.device | None) -> None:
    result, seconds = timed(queue, device)
    assert result == "result"
    assert 0.0 < seconds < 1.0


def test_the_device_of_tensors_is_that_of_the_first_that_has_one() -> None:
    tensors: list[Any] = [torch.ones(1), torch.ones(1, device="meta")]
    assert device_of(tensors) is None
    tensors.append(SimpleNamespace(device=XPU))
    assert device_of(tensors) == XPU


def test_memory_of_devices_is_what_their_allocators_count(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {torch.device("xpu", 0): 3, XPU: 4}
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", counts.__getitem__)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda: (5, 80))
    assert peak_bytes([torch.device("cpu"), *counts]) == 7
    assert peak_memory({torch.device("cpu"), XPU}) == 4
    assert device_memory() == 80


def test_without_a_device_memory_is_that_of_the_process() -> None:
    assert peak_bytes([torch.device("cpu")]) is None
    assert device_memory() is None
    assert peak_memory({torch.device("cpu")}) > 2**20


def test_a_device_has_the_name_that_its_module_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(get_device_name=lambda device: f"Data Center GPU {device.index}")
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    assert device_name(XPU) == "Data Center GPU 1"
    monkeypatch.setattr(torch, "get_device_module", lambda _: object())
    assert device_name(XPU) == "xpu"


def test_ranks_with_a_device_each_are_not_profiled_at_the_same_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ProfiledModel, "device", XPU)
    with pytest.raises(PlanError, match=r"ranks is 2, but the model is on xpu:1, and .*omit ranks"):
        profile([nn.Linear(1, 1)], torch.ones(2, 1), ranks=2)


def test_waits_of_the_host_are_the_lines_that_torch_warns_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    modes: list[str] = []

    def step() -> None:
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("something else", stacklevel=1)

    assert cuda_waits(lambda: None) is None  # without CUDA nobody knows
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    (place,) = cuda_waits(step) or []
    assert place.startswith(__file__)
    assert modes == ["warn", "default"]
    assert cuda_waits(lambda: None) == []
