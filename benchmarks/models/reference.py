"""The unwrapped model in a plain loop over micro-batches, under the same rules for randomness."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from stageline.model.own_loss import own_loss
from stageline.model.recording.call_arguments import call_arguments
from stageline.runtime.exactness.randomness.seeded_draws import layer_seed


def plain_losses(
    model: nn.Module,
    parts: list[tuple[Any, Any]],
    weights: list[float],
    loss_fn: Any,
    layers: Mapping[str, list[str]],
    seed: int = 0,
    step: int = 0,
) -> list[Tensor]:
    """Add gradients to the model's parameters; return the losses of the micro-batches.

    `layers` has the names of a pipeline's layers with those of their parameters. Each layer draws
    from a generator that is seeded where the model calls the module of that name. A weight that
    several layers use has its gradient by layer, and these are added in their order at the end.
    """
    uses = _tied_uses(model, layers)
    aliases = {
        (layer, weight): nn.Parameter(weight.detach())
        for weight, names in uses.items()
        for layer in names
    }
    calls: Counter[str] = Counter()
    inside: list[str] = []  # a layer's module may call that of another layer
    microbatch, is_backward = 0, False

    def enter(name: str) -> None:
        inside.append(name)
        if len(inside) > 1:
            return
        calls[name] += not is_backward
        layer = name if calls[name] == 1 else f"{name}@{calls[name]}"
        calls[name] -= is_backward  # a checkpoint runs the last call again first
        if layer in layers:
            torch.manual_seed(layer_seed(seed, step, microbatch, layer))
            for full_name in layers[layer]:
                _set(model, full_name, layer, aliases, originals)

    originals = dict(model.named_parameters(remove_duplicate=False))
    hooks = []
    for name in {layer.partition("@")[0] for layer in layers}:
        module = model.get_submodule(name)
        hooks.append(module.register_forward_pre_hook(lambda *_, name=name: enter(name)))
        hooks.append(
            module.register_forward_hook(lambda *_: inside.pop() and None, always_call=True)
        )
    losses = []
    try:
        for microbatch, ((inputs, target), weight) in enumerate(zip(parts, weights, strict=True)):
            calls.clear()
            args, kwargs = call_arguments(model, inputs, {})
            torch.manual_seed(layer_seed(seed, step, microbatch, next(iter(layers))))
            output = model(*args, **kwargs)
            loss = own_loss(output) if loss_fn is None else loss_fn(output, target)
            is_backward = True
            loss.backward(torch.full_like(loss, weight))
            is_backward = False
            losses.append(loss.detach())
            _restore(model, originals)
    finally:
        for hook in hooks:
            hook.remove()
        _restore(model, originals)
    _add_gradients(uses, aliases)
    return losses


def _add_gradients(uses: Mapping[nn.Parameter, list[str]], aliases: Mapping[Any, Tensor]) -> None:
    """Add the gradients of a weight's uses in the order of layers."""
    for tied, names in uses.items():
        for layer in names:
            gradient = aliases[layer, tied].grad
            if gradient is not None:
                tied.grad = gradient if tied.grad is None else tied.grad + gradient


def loss_weights(
    model: nn.Module, parts: list[tuple[Any, Any]], sizes: list[int], loss_fn: Any
) -> list[float]:
    """Return the weights of micro-batches: shares of the targets that their loss counts.

    What a model's own loss counts is seen by watching torch's cross-entropy. If there is none, or
    more than one, or the loss is computed outside, samples count.
    """
    counts: list[float] = [float(size) for size in sizes]
    if loss_fn is None:
        found = [_counted_targets(model, inputs) for inputs, _ in parts]
        if all(len(each) == 1 for each in found):
            counts = [each[0] for each in found]
    return [count / sum(counts) for count in counts]


def _counted_targets(model: nn.Module, inputs: Any) -> list[float]:
    """Return how many targets each cross-entropy of a forward does not ignore."""
    found: list[float] = []
    own = functional.cross_entropy

    def watched(logits: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        found.append(float((target != kwargs.get("ignore_index", -100)).sum()))
        return own(logits, target, *args, **kwargs)

    args, kwargs = call_arguments(model, inputs, {})
    with (
        patch.object(functional, "cross_entropy", watched),
        torch.random.fork_rng(devices=[]),
        torch.no_grad(),
    ):
        # copies of buffers, not of the model: one whose attributes have a graph cannot be copied
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        functional_call(model, buffers, args, kwargs)
    return found


def _tied_uses(model: nn.Module, layers: Mapping[str, list[str]]) -> dict[nn.Parameter, list[str]]:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    users: dict[nn.Parameter, dict[str, None]] = {}
    for layer, names in layers.items():
        for name in names:
            users.setdefault(parameters[name], {})[layer] = None
    return {weight: list(found) for weight, found in users.items() if len(found) > 1}


def _set(model: nn.Module, name: str, layer: str, aliases: Any, originals: Any) -> None:
    parent, _, own = name.rpartition(".")
    weight = originals[name]
    if (layer, weight) in aliases:
        model.get_submodule(parent)._parameters[own] = aliases[layer, weight]  # noqa: SLF001


def _restore(model: nn.Module, originals: Mapping[str, nn.Parameter]) -> None:
    for name, parameter in originals.items():
        parent, _, own = name.rpartition(".")
        model.get_submodule(parent)._parameters[own] = parameter  # noqa: SLF001
