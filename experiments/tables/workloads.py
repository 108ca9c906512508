"""The models of tables 2 and 3, and a ResNet, with the devices that they are estimated for.

A profile is estimated from shapes alone, at the data sheet's rates, and kept in runs/.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import stageline as sl
from stageline.zoo import gpt
from stageline.zoo.amoebanet import amoebanet_d
from stageline.zoo.resnet import resnet
from stageline.zoo.transformer import transformer

RUNS = Path(__file__).parent / "runs"


class Accelerator(NamedTuple):
    """A device and its links, with the rates of their data sheets."""

    name: str
    flops: float  # per second
    bandwidth: float  # of its memory, bytes per second
    memory: float  # bytes
    link: float  # bytes per second to the next device


TPU = Accelerator("TPU v3 core", flops=61.5e12, bandwidth=450e9, memory=16e9, link=80e9)
# PCI-E 3.0 × 16 moves about 12 GB/s; without NVLink a message is copied twice, through the host.
GPU = Accelerator("P100, PCI-E", flops=9.3e12, bandwidth=732e9, memory=16e9, link=6e9)


class Sample(NamedTuple):
    """A model on the meta device, and a batch for it."""

    layers: sl.LayerSequence
    loss_fn: Callable[[Tensor, Tensor], Tensor]
    inputs: Tensor
    target: Tensor


@dataclass(frozen=True)
class Workload:
    """A model, its mini-batch and its devices; `microbatches` are the columns of its table."""

    name: str
    device: Accelerator
    batch: int
    microbatches: tuple[int, ...]
    sample: Callable[[], Sample]

    @property
    def has_slow_links(self) -> bool:
        return self.device is GPU

    def profile(self, folder: Path = RUNS) -> sl.Profile:
        """Return the estimate for all sizes of micro-batches, from a file if it is there."""
        path = folder / f"{self.name}, {self.device.name}.json".replace(" ", "_")
        if path.exists():
            return sl.Profile.load(path)
        with torch.device("meta"):
            layers, loss_fn, inputs, target = self.sample()
        found = sl.estimate(
            layers,
            inputs,
            flops=self.device.flops,
            bandwidth=self.device.bandwidth,
            loss_fn=loss_fn,
            target=target,
            sizes=sorted(self.batch // count for count in self.microbatches),
        )
        folder.mkdir(parents=True, exist_ok=True)
        found.save(path)
        return found


def images(layers: sl.LayerSequence, side: int) -> Sample:
    inputs, target = torch.empty(1, 3, side, side), torch.empty(1, dtype=torch.long)
    return Sample(layers, cross_entropy, inputs, target)


def sequences(num_layers: int) -> Sample:
    tokens = torch.empty(1, 1024, dtype=torch.long)
    return Sample(transformer(num_layers), gpt.loss, tokens, tokens)


def residual() -> Sample:
    """33 blocks: images of 56×56 give them the work of a ResNet, whose stem starts from 224×224."""
    return images(resnet(channels=3, classes=1000, width=64, blocks=[3, 4, 23, 3]), side=56)


ALL = (1, 4, 32)
AMOEBANET = Workload(
    "AmoebaNet-D (18, 256)", TPU, 128, ALL, lambda: images(amoebanet_d(num_filters=256), 224)
)
RESNET = Workload("ResNet", TPU, 128, ALL, residual)
SMALL_AMOEBANET = Workload(
    "AmoebaNet-D (18, 128)", GPU, 128, (32,), lambda: images(amoebanet_d(num_filters=128), 224)
)
SLOW_RESNET = Workload("ResNet, slow links", GPU, 128, (32,), residual)
WORKLOADS = (
    AMOEBANET,
    Workload("Transformer-48", TPU, 32, ALL, lambda: sequences(48)),
    RESNET,
    SMALL_AMOEBANET,
    Workload("Transformer-24", GPU, 32, (32,), lambda: sequences(24)),
    SLOW_RESNET,
)
BY_NAME = {workload.name: workload for workload in WORKLOADS}
