"""What a real device is asked for: torch's streams and events, recorded in their place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from stageline.runtime.accelerators.torch_accelerator import TorchAccelerator
from stageline.runtime.devices import accelerators_of
from stageline.runtime.exactness.strided_copy import misalignment, share_memory

DEVICE = torch.device("cuda", 1)


class FakeStream:
    """A stream that writes down what it is asked for."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls = name, calls

    def record_event(self) -> str:
        self.calls.append(f"{self.name} records")
        return f"event of {self.name}"

    def wait_event(self, event: str) -> None:
        self.calls.append(f"{self.name} waits for {event}")


class FakeTensor:
    """A tensor on a device that writes down where it is copied and kept."""

    def __init__(self, where: str, calls: list[str]) -> None:
        self.device, self.calls = torch.device(where), calls

    def record_stream(self, stream: FakeStream) -> None:
        self.calls.append(f"kept for {stream.name}")

    def pin_memory(self) -> FakeTensor:
        self.calls.append("pinned")
        return self

    def to(self, device: torch.device, *, non_blocking: bool) -> FakeTensor:
        assert non_blocking  # or the host would wait
        self.calls.append(f"copied to {device}")
        return FakeTensor(str(device), self.calls)

    def copy_(self, source: FakeTensor, *, non_blocking: bool) -> FakeTensor:
        assert non_blocking
        self.calls.append(f"copied from {source.device}")
        return self


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What torch is asked for, in order."""
    found: list[str] = []

    @contextmanager
    def device_index(index: int) -> Iterator[None]:
        found.append(f"device {index}")
        yield
        found.append("device before")

    def empty_like(source: FakeTensor, *, device: str, pin_memory: bool) -> FakeTensor:
        assert pin_memory
        return FakeTensor(device, source.calls)

    monkeypatch.setattr(torch.accelerator, "device_index", device_index)
    monkeypatch.setattr(
        torch.accelerator, "current_stream", lambda device: FakeStream(f"current {device}", found)
    )
    monkeypatch.setattr(torch, "Stream", lambda device: FakeStream(f"new {device}", found))
    monkeypatch.setattr(torch, "empty_like", empty_like)
    return found


@pytest.fixture
def accelerator() -> Any:
    return TorchAccelerator(DEVICE)


def test_a_rank_works_on_its_device(accelerator: Any, calls: list[str]) -> None:
    with accelerator.rank_thread(lambda: (0, "0F0")):
        assert calls == ["device 1"]
    assert calls == ["device 1", "device before"]


def test_events_are_those_of_the_current_stream(accelerator: Any, calls: list[str]) -> None:
    accelerator.wait_event(accelerator.record_event())
    assert calls == ["current cuda:1 records", "current cuda:1 waits for event of current cuda:1"]


def test_a_new_stream_is_one_of_the_device_and_is_its_own_context(
    accelerator: Any, calls: list[str]
) -> None:
    stream = accelerator.new_stream("copies")
    assert stream.name == "new cuda:1"
    assert accelerator.queueing_on(stream) is stream
    assert calls == []


def test_memory_is_kept_for_the_current_stream(accelerator: Any, calls: list[str]) -> None:
    accelerator.keep_alive(FakeTensor("cuda:1", calls))
    assert calls == ["kept for current cuda:1"]


def test_no_copy_makes_the_host_wait(accelerator: Any, calls: list[str]) -> None:
    assert accelerator.copy_from(FakeTensor("cuda:0", calls), None).device == DEVICE
    assert calls == ["copied to cuda:1"]
    calls.clear()
    assert accelerator.upload(FakeTensor("cpu", calls)).device == DEVICE
    assert calls == ["pinned", "copied to cuda:1"]
    calls.clear()
    assert accelerator.download(FakeTensor("cuda:1", calls)).device == torch.device("cpu")
    assert calls == ["copied from cuda:1"]


STRIDED = {
    "dense": torch.arange(24.0).view(4, 6),
    "transposed": torch.arange(24.0).view(4, 6).t(),
    "slice of columns": torch.arange(24.0).view(4, 6)[:, 1:4],
    "slice of rows": torch.arange(24.0).view(4, 6)[1:],
    "expanded": torch.arange(4.0)[:, None].expand(4, 3),
}


@pytest.mark.parametrize("name", STRIDED)
@pytest.mark.parametrize("function", ["copy_from", "upload", "bring"])
def test_a_copy_has_the_strides_and_the_alignment_that_kernels_are_chosen_by(
    name: str, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As messages between processes have, and copies of simulated devices."""
    original = STRIDED[name]
    move = Tensor.to
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(Tensor, "to", lambda tensor, *_, **__: move(tensor, "cpu", copy=True))
    accelerator = TorchAccelerator(torch.device("cpu"))
    others = [accelerator] if function == "copy_from" else []
    found = getattr(accelerator, function)(original, *others)
    assert torch.equal(found, original)
    assert found.stride() == original.stride()
    assert misalignment(found) == misalignment(original)
    assert not share_memory(found, original)


def test_a_batch_is_pinned_only_if_it_is_in_host_memory(accelerator: Any, calls: list[str]) -> None:
    accelerator.bring(FakeTensor("cpu", calls))
    assert calls == ["pinned", "copied to cuda:1"]
    calls.clear()
    accelerator.bring(FakeTensor("cuda:0", calls))
    assert calls == ["copied to cuda:1"]


def test_ranks_have_the_accelerator_that_torch_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    devices = [torch.device(name) for name in ("cpu", "cuda:0", "cuda:0", "cuda", "cuda:3")]
    found = accelerators_of([None, *devices], simulated=False)
    assert [each and str(each.device) for each in found] == [
        *(None, None, "cuda:0", "cuda:0", "cuda:3", "cuda:3")
    ]
    assert found[2] is found[3]
    assert found[4] is found[5]


def test_ranks_on_the_cpu_have_none() -> None:
    assert accelerators_of([None, torch.device("cpu")], simulated=False) == (None, None)
