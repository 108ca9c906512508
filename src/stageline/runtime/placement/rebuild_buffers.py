"""Fill buffers that no checkpoint has, in a model that was built on the meta device.

The values of a buffer that is not persistent follow from the module alone, and often the module
can compute them again. These ways are tried, in this order:

    module.reset_buffers()
    model._init_weights(module)      the model around it: transformers, timm and others have this
    module.rope_init_fn(config, …)   rotary embeddings of transformers, without their model
    module.reset_parameters()

They are tried on a copy of the module that has its weights on the meta device. So weights do not
change, and are not in memory twice.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from stageline.model.device_settings import preserved_generators, seed_generators
from stageline.model.layers import LayerSequence
from stageline.runtime.exactness.randomness.seeded_draws import layer_seed
from stageline.torch_private import is_persistent, version_of

if TYPE_CHECKING:
    from stageline.runtime.placement.materialise import UninitializedTensor

INIT = "_init_weights"
Rebuild = Callable[[Any], object]


def rebuild_buffers(
    blanks: Iterable[UninitializedTensor], models: Mapping[nn.Module, Any], seed: int
) -> None:
    """Fill those of the blanks that are buffers, are not persistent, and can be computed.

    `models` are the results of `initializing_models`.
    """
    for blank in blanks:
        tensor = getattr(blank.module, blank.name)
        if isinstance(tensor, nn.Parameter) or is_persistent(blank.module, blank.name):
            continue
        for rebuild in _ways(blank.module, models.get(blank.module)):
            # A way that fails leaves the buffer blank; the first step then says so.
            with suppress(Exception), torch.no_grad(), preserved_generators():
                seed_generators(layer_seed(seed, 0, 0, blank.full_name))
                _rebuild(blank, tensor, rebuild)
            if blank.is_initialized:
                break


def initializing_models(layers: LayerSequence) -> dict[nn.Module, Any]:
    """Return for each module the innermost model around it that initializes modules."""
    found: dict[nn.Module, Any] = {}

    def visit(module: nn.Module, model: nn.Module | None) -> None:
        model = module if _initializes_modules(module) else model
        if model is not None:
            found[module] = model
        for child in module.children():
            visit(child, model)

    for root in (*layers.containers, *layers.modules):
        visit(root, None)
    return found


def initialize_module(model: Any, module: nn.Module) -> None:
    """Initialize a module as the model around it does."""
    getattr(model, INIT)(module)


def _initializes_modules(module: nn.Module) -> bool:
    """Return whether it has `_init_weights(module)`; a function of other arguments is no such."""
    function = getattr(module, INIT, None)
    if not inspect.ismethod(function):
        return False
    parameters = list(inspect.signature(function).parameters.values())
    needed = [each.name for each in parameters if each.default is each.empty]
    return needed in (["module"], ["m"])


def _ways(module: Any, model: Any) -> Iterator[Rebuild]:
    if callable(getattr(module, "reset_buffers", None)):
        yield lambda each: each.reset_buffers()
    if model is not None:
        yield partial(initialize_module, model)
    if hasattr(module, "config") and hasattr(module, "inv_freq"):
        yield _rebuild_rotary
    if callable(getattr(module, "reset_parameters", None)):
        yield lambda each: each.reset_parameters()


def _rebuild_rotary(module: Any) -> None:
    """Compute the frequencies with the module's own function; other types need their model."""
    if hasattr(module, "rope_init_fn"):
        frequencies, _ = module.rope_init_fn(module.config, torch.device("cpu"))
    elif getattr(module, "rope_type", None) == "default":
        frequencies, _ = module.compute_default_rope_parameters(module.config)
    else:
        return
    module.inv_freq.copy_(frequencies)
    if hasattr(module, "original_inv_freq"):
        module.original_inv_freq.copy_(frequencies)


def _rebuild(blank: UninitializedTensor, tensor: Tensor, rebuild: Rebuild) -> None:
    """Compute the buffer in a copy of its module, and take it over if all of it was computed."""
    memo: dict[int, Any] = {id(each): _on_meta(each) for each in _lasting_tensors(blank.module)}
    copied = copy.deepcopy(blank.module, memo)
    version = version_of(getattr(copied, blank.name))
    rebuild(copied)
    value = getattr(copied, blank.name)
    is_computed = replace(blank, module=copied, version=version).is_initialized
    if is_computed and not value.is_meta and value.shape == tensor.shape:
        tensor.copy_(value)


def _lasting_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Yield the parameters and persistent buffers of a module and its submodules."""
    yield from module.parameters()
    for part in module.modules():
        for name, buffer in part.named_buffers(recurse=False):
            if is_persistent(part, name):
                yield buffer


def _on_meta(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
