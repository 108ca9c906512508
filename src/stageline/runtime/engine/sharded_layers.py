"""Layers whose weights are in shards on all replicas: torch's `fully_shard` beside the pipeline.

    F              the weights of a layer are gathered from all replicas, by hooks on its forward
    B              they are gathered again if they were dropped, and gradients are added as a whole
    REDUCE_GRAD    the sum of the gradients over replicas, of which each replica keeps its shard

The hooks are torch's. So each of these collectives is in the middle of an action, and replicas have
to run the same actions in the same order, which they do if they have as many micro-batches.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from stageline.errors import BatchError, ModelError
from stageline.model.layers import Layer, LayerSequence
from stageline.runtime.backends.backend import Collectives, Group
from stageline.runtime.exactness.gradient_types import has_fewer_bits
from stageline.runtime.placement.checks import is_asynchronous
from stageline.runtime.placement.layout import Layout
from stageline.schedules.schedule import Schedule
from stageline.torch_private_training import (
    is_sharded_module,
    reduce_sharded_gradients,
    sharded_origins,
)

USAGE = "call fully_shard(layer, mesh=mesh['dp']) with the mesh that Pipeline is given"


class ShardedLayers:
    """The sharded modules of this process, by stage, and all sharded weights. It has no state."""

    def __init__(self, layout: Layout, collectives: Collectives) -> None:
        self.collectives = collectives
        self.by_stage: list[list[Any]] = [
            [m for number in numbers for m in sharded_modules(layout.layers.layers[number].module)]
            if layout.is_here(numbers[0])
            else []
            for numbers in layout.stages
        ]
        self.weights = {
            weight for layer in layout.layers for weight in sharded_weights(layer.module).values()
        }
        for module in self.modules:
            # losses are weighted so that gradients are summed; gloo cannot do anything else
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(enable=True)

    @staticmethod
    def of(layout: Layout, collectives: Collectives) -> ShardedLayers | None:
        """Return None if no layer is sharded; raise if they cannot be trained like this."""
        if not has_sharded_modules(layout.layers):
            return None
        _check(layout, collectives)
        return ShardedLayers(layout, collectives)

    @property
    def modules(self) -> list[Any]:
        return [module for modules in self.by_stage for module in modules]

    def begin(self) -> None:
        """Let backwards add to gradients of whole weights, and reduce none."""
        for module in self.modules:
            module.reshard()
            _set_reducing(module, is_reducing=False)

    def check_length(self, num_microbatches: int) -> None:
        """Raise on all replicas unless all of them have the same number of micro-batches."""
        what = "numbers of micro-batches"
        counts = self.collectives.gather(num_microbatches, what, Group.REPLICAS)
        if len({*counts}) > 1:
            raise BatchError(
                f"the replicas have batches of {counts} micro-batches, but where weights are "
                "sharded all replicas run a layer together: give each of them as many samples, "
                "or at least as many as there are micro-batches"
            )

    def reduce(self, stage: int) -> None:
        """Sum a stage's gradients over the replicas."""
        for module in self.by_stage[stage]:
            _set_reducing(module, is_reducing=True)
        for module in reversed(self.by_stage[stage]):
            reduce_sharded_gradients(module)
        for module in self.by_stage[stage]:
            _set_reducing(module, is_reducing=False)

    def end(self) -> None:
        """Drop whole weights that are still there, so that parameters are those of optimizers."""
        for module in self.modules:
            module.reshard()
            _set_reducing(module, is_reducing=True)


def sharded_modules(module: nn.Module) -> list[nn.Module]:
    return [part for part in module.modules() if is_sharded_module(part)]


def has_sharded_modules(layers: LayerSequence) -> bool:
    return any(is_sharded_module(part) for part in layers.modules.modules())


def sharded_weights(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the weights of a layer that `fully_shard` manages; some may be excluded from it."""
    return {
        f"{name}.{own}" if name else own: weight
        for name, part in module.named_modules()
        if is_sharded_module(part)
        for own, weight in part.named_parameters()
        if hasattr(weight, "to_local")
    }


def _set_reducing(module: Any, *, is_reducing: bool) -> None:
    module.set_requires_gradient_sync(is_reducing, recurse=False)
    module.set_is_last_backward(is_reducing)


def check_sharded(layers: LayerSequence, schedule: Schedule) -> None:
    """Raise ModelError if layers are sharded and a schedule needs older versions of weights."""
    if is_asynchronous(schedule) and has_sharded_modules(layers):
        raise ModelError(
            f"layers are sharded by fully_shard, but with {schedule.name!r} older versions of "
            "their weights have to be kept, and fully_shard gathers the latest: use a synchronous "
            "schedule, or omit fully_shard"
        )


def check_types(layers: LayerSequence, dtype: torch.dtype) -> None:
    """Raise ModelError if gradients that fully_shard adds should have another type."""
    for layer in layers:
        for name, weight in sharded_weights(layer.module).items():
            if has_fewer_bits(weight, dtype):
                raise ModelError(
                    f"accumulate is {dtype}, but {layer.full_name(name)!r} of {weight.dtype} is "
                    "sharded by fully_shard, which adds its gradients: keep the weights in "
                    "float32, and give fully_shard mp_policy=MixedPrecisionPolicy("
                    "param_dtype=torch.bfloat16, reduce_dtype=torch.float32)"
                )


def check_not_recorded(model: nn.Module) -> None:
    """Raise ModelError if a module is sharded whose forward, or that around it, is recorded."""
    sharded = [name for name, part in model.named_modules() if is_sharded_module(part)]
    if sharded:
        raise ModelError(
            f"{sharded[0] or type(model).__name__!r} is sharded by fully_shard, but the forward of "
            "the model is recorded, without the hooks that gather weights: give Pipeline an "
            "nn.Sequential or a list of layers, and call fully_shard for each layer"
        )


def _check(layout: Layout, collectives: Collectives) -> None:
    """Raise ModelError unless each sharded weight is on just the replicas of its stage."""
    replicas = collectives.gather(dist.get_rank(), "ranks of replicas", Group.REPLICAS)
    for layer in layout.layers:
        for name, weight in sharded_weights(layer.module).items():
            _check_mesh(layer, name, weight, replicas)
    _check_untied(layout.layers)


def _check_untied(layers: LayerSequence) -> None:
    owners: dict[int, str] = {}
    for layer in layers:
        for origin in sharded_origins(layer.module):
            if (first := owners.setdefault(origin, layer.name)) != layer.name:
                raise ModelError(
                    f"layers {first!r} and {layer.name!r} share a weight, but fully_shard has made "
                    "two weights of it: call fully_shard for none of these layers"
                )


def _check_mesh(layer: Layer, name: str, weight: Any, replicas: list[int]) -> None:
    mesh = weight.device_mesh
    others = [dim for dim in range(mesh.ndim) if _line(mesh, dim) != replicas]
    if len(others) == mesh.ndim or any(_name(mesh, dim) != "tp" for dim in others):
        raise ModelError(
            f"{layer.full_name(name)!r} is sharded over ranks {mesh.mesh.flatten().tolist()}, but "
            f"the replicas of its stage are ranks {replicas}: {USAGE}"
        )


def _line(mesh: Any, dim: int) -> list[int]:
    """Return the ranks along a dimension of a mesh, through this process."""
    found: list[int] = dist.get_process_group_ranks(mesh.get_group(dim))
    return found


def _name(mesh: Any, dim: int) -> str:
    names = mesh.mesh_dim_names
    return names[dim] if names else ""
