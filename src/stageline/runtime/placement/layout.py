"""Where everything is: layers in stages, stages on ranks, ranks on devices and in processes.

A layout is a frozen value. `replan` makes a new one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from stageline.errors import ModelError
from stageline.model.layers import Layer, LayerSequence
from stageline.runtime.accelerators.accelerator import Accelerator
from stageline.schedules.placement import ranks_of
from stageline.schedules.schedule import Schedule


@dataclass(frozen=True)
class Layout:
    """The layers of each stage, the rank and device of each layer, and which ranks are here."""

    layers: LayerSequence
    schedule: Schedule
    stages: tuple[range, ...]  # the numbers of their layers
    devices: tuple[torch.device | None, ...]  # by rank
    ranks_here: frozenset[int]  # the ranks that run in this process
    costs: tuple[float, ...] = ()  # of the layers, by which they were cut
    uses_threads: bool = False  # the ranks of this process run at the same time
    accelerators: tuple[Accelerator | None, ...] = ()  # by rank; none at all on the CPU

    def with_stages(self, stages: Sequence[range]) -> Layout:
        """Return the layout with other layers in the same stages."""
        return replace(self, stages=tuple(stages))

    @cached_property
    def rank_of_layer(self) -> tuple[int, ...]:
        """Return each layer's rank: of several that hold it, the one that is here, or the first."""
        ranks = [0] * len(self.layers)
        for stage, numbers in enumerate(self.stages):
            holders = ranks_of(self.schedule.placement, self.schedule.replicas, stage)
            rank = next((rank for rank in holders if rank in self.ranks_here), holders[0])
            for number in numbers:
                ranks[number] = rank
        return tuple(ranks)

    @property
    def balance(self) -> tuple[int, ...]:
        """Return the number of layers in each stage."""
        return tuple(map(len, self.stages))

    def is_here(self, layer: int) -> bool:
        return self.rank_of_layer[layer] in self.ranks_here

    @cached_property
    def layers_here(self) -> tuple[Layer, ...]:
        """Return the layers of this process."""
        return tuple(layer for n, layer in enumerate(self.layers) if self.is_here(n))

    @cached_property
    def device_of_layer(self) -> dict[int, torch.device | None]:
        """Return the devices of the layers of this process."""
        ranks = enumerate(self.rank_of_layer)
        return {n: self.devices[rank] for n, rank in ranks if rank in self.ranks_here}

    @cached_property
    def accelerator_of_layer(self) -> dict[int, Accelerator | None]:
        """Return the accelerators of the layers of this process."""
        ranks = enumerate(self.rank_of_layer)
        return {n: self.accelerator(rank) for n, rank in ranks if rank in self.ranks_here}

    @cached_property
    def has_accelerators(self) -> bool:
        return any(self.accelerators)

    def accelerator(self, rank: int) -> Accelerator | None:
        return self.accelerators[rank] if self.accelerators else None

    def stage_device(self, stage: int) -> torch.device | None:
        """Return the device that a stage runs on."""
        return self.devices[self.schedule.placement[stage]]

    @property
    def parameter_numbers(self) -> dict[nn.Parameter, int]:
        """Return the numbers of all parameters, in the order of the layers."""
        return {p: number for number, p in enumerate(self.layers.modules.parameters())}

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield each parameter of this process once, in the order of the layers."""
        return nn.ModuleList(layer.module for layer in self.layers_here).parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of this process under their names in the model."""
        seen: set[nn.Parameter] = set()
        for layer in self.layers_here:
            for name, parameter in layer.module.named_parameters():
                if parameter not in seen:
                    seen.add(parameter)
                    full_name = layer.full_name(name)
                    yield self.layers.first_names.get(full_name, full_name), parameter

    def state_dict(self) -> dict[str, Any]:
        """Return parameters and buffers of this process under their names in the model."""
        return LayerSequence(self.layers_here).state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any], *, strict: bool) -> None:
        """Copy parameters and buffers of this process from those of the whole model.

        Everything is checked before anything is changed.
        """
        self._check_state(state_dict, strict=strict)
        for layer in self.layers_here:
            targets = layer.module.state_dict()
            names = {layer.full_name(name): name for name in targets}
            own = {
                names[n]: _in_parts_of(targets[names[n]], tensor)
                for n, tensor in state_dict.items()
                if n in names
            }
            layer.module.load_state_dict(own, strict=strict)

    def _check_state(self, state_dict: Mapping[str, Any], *, strict: bool) -> None:
        known = self.layers.state_dict().keys()
        for name in state_dict:
            if strict and name not in known:
                raise ModelError(
                    f"the state has {name!r}, but the model has no such parameter or buffer: use "
                    "strict=False to ignore it"
                )
        for name, tensor in self.state_dict().items():
            if name not in state_dict and strict:
                raise ModelError(
                    f"the state lacks {name!r}, but the model has it: use strict=False to keep it"
                )
            found = state_dict.get(name)
            if isinstance(found, torch.Tensor) and found.shape != tensor.shape:
                raise ModelError(
                    f"{name!r} has shape {tuple(found.shape)} in the state, but "
                    f"{tuple(tensor.shape)} in the model: load the state of the same model"
                )

    def stage_parameters(self, stage: int) -> list[nn.Parameter]:
        """Return the parameters of a stage's layers, each once."""
        layers = (self.layers.layers[number] for number in self.stages[stage])
        return list(dict.fromkeys(p for layer in layers for p in layer.module.parameters()))

    @property
    def first_rank_of(self) -> dict[nn.Parameter, int]:
        """Return for each parameter the rank of the first layer that uses it."""
        ranks: dict[nn.Parameter, int] = {}
        for layer, rank in zip(self.layers, self.rank_of_layer, strict=True):
            for parameter in layer.module.parameters():
                ranks.setdefault(parameter, rank)
        return ranks

    def counted_on(self, ranks: Iterable[int]) -> dict[int, nn.Parameter]:
        """Return the parameters of ranks by their numbers, without those of an earlier rank."""
        ranks = set(ranks)
        numbers = self.parameter_numbers
        found = ((numbers[p], p) for p, rank in self.first_rank_of.items() if rank in ranks)
        return dict(sorted(found, key=lambda pair: pair[0]))

    @property
    def tied(self) -> dict[nn.Parameter, tuple[int, ...]]:
        """Return the weights that several layers use, with the numbers of these layers."""
        users: dict[nn.Parameter, list[int]] = {}
        for number, layer in enumerate(self.layers):
            for parameter in layer.module.parameters():
                users.setdefault(parameter, []).append(number)
        return {p: tuple(numbers) for p, numbers in users.items() if len(numbers) > 1}

    def tied_on(self, rank: int) -> set[nn.Parameter]:
        """Return the tied weights whose gradients a rank adds up.

        Where ranks share memory that is the first rank that uses a weight, else all of them.
        """
        first, others = self.first_rank_of, self.ranks_here - {rank}
        return {p for p in self.tied if first[p] not in others}


def _in_parts_of(target: Any, source: Any) -> Any:
    """Return a whole tensor in the parts that processes have of the one that it is copied to."""
    is_whole = isinstance(source, torch.Tensor) and not hasattr(source, "device_mesh")
    if not is_whole or not hasattr(target, "device_mesh"):
        return source
    from torch.distributed.tensor import distribute_tensor  # noqa: PLC0415  its import takes 0.2 s

    # without a source rank nothing is sent: every process has all of it
    return distribute_tensor(source, target.device_mesh, target.placements, src_data_rank=None)
