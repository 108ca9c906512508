"""A plain training loop on one device: the reference that pipelines must match bit for bit.

It has no stages, schedules or messages, and shares only the rule for seeds with the runtime. The
rules for micro-batches, randomness, BatchNorm and tied weights are implemented here a second time,
as briefly as possible, so that a mistake in one of the two implementations is found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from stageline.model.device_settings import preserved_generators
from stageline.model.layers import LayerSequence
from stageline.runtime.exactness.randomness.seeded_draws import layer_seed
from stageline.torch_private import BatchNormBase

Batch = tuple[Any, Tensor]  # inputs (a dict if they are named) and target
# The number of values, their mean and the sum of squared deviations, per channel.
Moments = tuple[int, Tensor, Tensor]


def train_plainly(
    layers: LayerSequence,
    loss_fn: Callable[[Any, Any], Tensor],
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Batch],
    *,
    num_microbatches: int,
    seed: int = 0,
    batch_norm: str = "minibatch",
) -> list[float]:
    """Run an optimizer step for each batch, and return the losses."""
    doubles = untie(layers)
    norms = [part for part in layers.modules.modules() if isinstance(part, BatchNormBase)]
    losses = []
    with preserved_generators():
        for step, (inputs, target) in enumerate(batches):
            sizes = even_sizes(len(target), num_microbatches)
            parts = zip(cut(inputs, sizes), cut(target, sizes), strict=True)
            loss = 0.0
            with statistics(norms if batch_norm == "minibatch" else []):
                for microbatch, (part, wanted) in enumerate(parts):
                    output = forward(layers, part, seed, step, microbatch)
                    share = loss_fn(output, wanted) * (len(wanted) / len(target))
                    share.backward()  # type: ignore[no-untyped-call]  # torch's own
                    loss += float(share.detach())
            add_up(doubles)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss)
    return losses


def forward(layers: LayerSequence, inputs: Any, seed: int, step: int, microbatch: int) -> Any:
    """Run all layers in order, each with the values it reads and its own seed."""
    values = dict(inputs) if isinstance(inputs, dict) else {"x": inputs}
    written: Any = ()
    for layer in layers:
        torch.manual_seed(layer_seed(seed, step, microbatch, layer.name))
        result = layer.module(*(values[name] for name in layer.reads))
        written = result if len(layer.writes) > 1 else (result,)
        values |= dict(zip(layer.writes, written, strict=True))
    return written[0]


def even_sizes(num_samples: int, num_microbatches: int) -> list[int]:
    """Return sizes that differ by at most one, larger ones first, without zeros."""
    each, more = divmod(num_samples, num_microbatches)
    sizes = [each + 1] * more + [each] * (num_microbatches - more)
    return [size for size in sizes if size]


def cut(batch: Any, sizes: list[int]) -> list[Any]:
    """Split a batch into micro-batches; values that are no tensors go to each of them."""
    if isinstance(batch, dict):
        columns = {name: cut(item, sizes) for name, item in batch.items()}
        return [{name: column[i] for name, column in columns.items()} for i in range(len(sizes))]
    return list(torch.split(batch, sizes)) if isinstance(batch, Tensor) else [batch] * len(sizes)


def untie(layers: LayerSequence) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """Give tied weights a parameter per layer, which shares memory but has its own gradient.

    Return pairs of the first layer's parameter and one of a later layer.
    """
    first: dict[nn.Parameter, int] = {}
    doubles: dict[tuple[nn.Parameter, int], nn.Parameter] = {}
    for number, layer in enumerate(layers):
        for part in layer.module.modules():
            for name, weight in list(part.named_parameters(recurse=False)):
                if first.setdefault(weight, number) != number:
                    double = doubles.setdefault((weight, number), nn.Parameter(weight.detach()))
                    double.grad_dtype = weight.grad_dtype
                    setattr(part, name, double)
    return [(weight, double) for (weight, _), double in doubles.items()]


def add_up(doubles: list[tuple[nn.Parameter, nn.Parameter]]) -> None:
    """Add the gradients of tied parameters to those of the first layer, in layer order."""
    for weight, double in doubles:
        assert weight.grad is not None
        assert double.grad is not None
        weight.grad, double.grad = weight.grad + double.grad, None


@contextmanager
def statistics(norms: list[BatchNormBase]) -> Iterator[None]:
    """Update running statistics once per mini-batch, in place of torch's own updates."""
    seen: dict[nn.Module, list[Moments]] = {norm: [] for norm in norms}
    before = {norm: [buffer.clone() for buffer in norm.buffers()] for norm in norms}

    def record(norm: nn.Module, args: tuple[Tensor, ...]) -> None:
        x = args[0].detach()
        running_mean, *_ = norm.buffers()  # under autocast it has another type than x
        mean, variance = torch.zeros_like(running_mean), torch.zeros_like(running_mean)
        # torch's own moments: with momentum 1 it puts them in place of the running ones
        nn.functional.batch_norm(x, mean, variance, training=True, momentum=1.0)
        count = x.numel() // x.shape[1]
        seen[norm].append((count, mean.double(), variance.double() * (count - 1)))

    hooks = [norm.register_forward_pre_hook(record) for norm in norms]
    yield
    for hook in hooks:
        hook.remove()
    for norm in norms:
        _update(norm, before[norm], seen[norm])


def _update(norm: BatchNormBase, before: list[Tensor], seen: list[Moments]) -> None:
    """Combine the micro-batches in ascending order in double precision, and round at the end.

    The order matters as it does for gradients: (9 a + b) / 10 of two floats is often exactly
    halfway between two others, and then the last bit of a double decides.
    """
    count, mean, squares = seen[0]
    for more, other_mean, other_squares in seen[1:]:
        delta, total = other_mean - mean, count + more
        mean = mean + delta * (more / total)
        squares = squares + other_squares + delta**2 * (count * more / total)
        count = total
    running_mean, running_variance, num_batches = before
    momentum = 1.0 / (float(num_batches) + 1) if norm.momentum is None else norm.momentum
    after = (
        (1 - momentum) * running_mean.double() + momentum * mean,
        (1 - momentum) * running_variance.double() + momentum * (squares / (count - 1)),
        num_batches + 1,
    )
    for buffer, value in zip(norm.buffers(), after, strict=True):
        buffer.copy_(value)
