"""Copies between devices and their overlap with work, measured on simulated devices."""

from __future__ import annotations

import torch

from stageline.planning.cluster.device_copies import COPIES, copy_link
from stageline.planning.cluster.measure_overlap import measure_overlap
from stageline.runtime.accelerators.accelerator import Accelerator
from stageline.runtime.accelerators.checked_accelerator import CheckedAccelerator
from stageline.runtime.devices import accelerators_of


def devices() -> list[Accelerator]:
    found = accelerators_of([None, None], simulated=True)
    return [each for each in found if each is not None]


class CountsCopies(CheckedAccelerator):
    """A device that notes the sizes of tensors that are copied to it."""

    sizes: list[int] = []  # noqa: RUF012  there is one

    def copy_from(self, tensor: torch.Tensor, source: Accelerator) -> torch.Tensor:
        self.sizes.append(tensor.nbytes)
        return super().copy_from(tensor, source)


def test_copies_of_two_sizes_tell_a_link_from_its_latency() -> None:
    source, other = devices()
    assert isinstance(other, CheckedAccelerator)
    target = CountsCopies("a device", other.simulation)
    with source.rank_thread():  # which raises if the copies are in no certain order
        link = copy_link(source, target)
    assert link.latency > 0.0
    assert link.bandwidth > 0.0
    assert target.sizes == [64] * (COPIES + 1) + [2**23] * (COPIES + 1)


def test_work_takes_as_long_on_all_ranks_and_is_timed_with_and_without_messages() -> None:
    own, _ = devices()
    order: list[str] = []
    found = measure_overlap(
        own, lambda: order.append("messages"), lambda: order.append("wait"), lambda _: 3, 8
    )
    assert min(found) > 0.0
    # of messages, work and work again, and both; the first of each two warms up
    alone, both = ["wait", "messages", "wait"], ["wait", "messages", "wait"]
    assert order == [*alone * 2, *["wait"] * 8, *both * 2]
