"""Cut layers into stages of consecutive layers, none of them empty."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

from stageline.errors import ModelError
from stageline.model.flops import forward_flops
from stageline.model.layers import LayerSequence

Cut = tuple[range, ...]  # the layer numbers of each stage


def cut(
    layers: LayerSequence,
    num_stages: int,
    balance: Sequence[int] | None = None,
    sample: Mapping[str, Any] | None = None,
) -> Cut:
    """Cut layers by the sizes in `balance`, or so that the costliest stage costs the least.

    The cost of a layer is its FLOPs for the sample inputs and its parameters, or only the latter.
    """
    if len(layers) < num_stages:
        raise ModelError(
            f"the model has {len(layers)} layers, but {num_stages} stages need one each at least: "
            "use fewer ranks or chunks, or split the model into smaller layers"
        )
    if balance is None:
        balance = balanced_sizes(_costs(layers, sample), num_stages)
    _check_balance(balance, len(layers), num_stages)
    return tuple(range(first, last) for first, last in pairwise(accumulate(balance, initial=0)))


def _check_balance(balance: object, num_layers: int, num_stages: int) -> None:
    sizes = list(balance) if isinstance(balance, Sequence) else []
    are_sizes = all(type(size) is int and size > 0 for size in sizes)
    if not are_sizes or (len(sizes), sum(sizes)) != (num_stages, num_layers):
        raise ModelError(
            f"balance is {balance!r}, but {num_layers} layers on {num_stages} stages need "
            f"{num_stages} numbers from 1 up whose sum is {num_layers}"
        )


def _costs(layers: LayerSequence, sample: Mapping[str, Any] | None) -> list[float]:
    """Return FLOPs plus parameters plus one per layer, so that every layer has a cost."""
    sizes = [sum(p.numel() for p in layer.module.parameters()) for layer in layers.layers]
    flops = forward_flops(layers, sample) if sample is not None else None
    return [1.0 + a + b for a, b in zip(sizes, flops or [0] * len(sizes), strict=True)]


def balanced_sizes(costs: Sequence[float], num_stages: int) -> list[int]:
    """Return the number of layers per stage with which the costliest stage costs the least.

    >>> balanced_sizes([4, 1, 1, 1, 4], 3)
    [1, 3, 1]
    """
    total = [0.0, *accumulate(costs)]
    num_layers = len(costs)
    best = [[float("inf")] * (num_layers + 1) for _ in range(num_stages + 1)]
    first = [[0] * (num_layers + 1) for _ in range(num_stages + 1)]
    best[0][0] = 0.0
    for stages in range(1, num_stages + 1):
        for end in range(stages, num_layers + 1):
            for start in range(stages - 1, end):
                largest = max(best[stages - 1][start], total[end] - total[start])
                if largest < best[stages][end]:
                    best[stages][end], first[stages][end] = largest, start
    ends = [num_layers]
    for stages in range(num_stages, 0, -1):
        ends.append(first[stages][ends[-1]])
    return [last - start for start, last in pairwise(reversed(ends))]
