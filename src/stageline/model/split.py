"""Cut layers into stages of consecutive layers, none of them empty."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

from stageline.errors import ModelError
from stageline.model.flops import forward_flops
from stageline.model.layers import LayerSequence
from stageline.torch_private_training import is_sharded_module

Cut = tuple[range, ...]  # the layer numbers of each stage


def cut(
    layers: LayerSequence,
    num_stages: int,
    balance: Sequence[int] | None = None,
    costs: Sequence[float] | None = None,
    cut_at: Sequence[str] = (),
) -> Cut:
    """Cut layers by the sizes in `balance`, or so that the costliest stage costs the least.

    `costs` are those of the layers; by default their numbers of parameters. Stages begin at the
    layers in `cut_at`; if it has fewer than there are stages, at others too.
    """
    if len(layers) < num_stages:
        raise ModelError(
            f"the model has {len(layers)} layers, but {num_stages} stages need one each at least: "
            "use fewer ranks or chunks, or split the model into smaller layers"
        )
    if cut_at:
        _check_places(layers, num_stages, balance, cut_at)
        places = _places(layers, cut_at)
        balance = sizes_with_cuts(costs or layer_costs(layers), num_stages, places)
    if balance is None:
        balance = balanced_sizes(costs or layer_costs(layers), num_stages)
    _check_balance(balance, len(layers), num_stages)
    return tuple(range(first, last) for first, last in pairwise(accumulate(balance, initial=0)))


def _check_places(
    layers: LayerSequence, num_stages: int, balance: object, cut_at: Sequence[str]
) -> None:
    names = [layer.name for layer in layers]
    if balance is not None:
        raise ModelError(
            "balance and cut_at were both given, but each decides the stages: omit one"
        )
    for name in [cut_at] if isinstance(cut_at, str) else cut_at:
        if name not in names[1:]:
            raise ModelError(
                f"cut_at has {name!r}, but a stage can begin at one of these layers: "
                f"{', '.join(names[1:])}"
            )
    if len(set(cut_at)) >= num_stages:
        raise ModelError(
            f"cut_at has {len(set(cut_at))} names, but {num_stages} stages begin at "
            f"{num_stages - 1} places beside the start: omit some, or use more ranks"
        )


def _places(layers: LayerSequence, cut_at: Sequence[str]) -> list[int]:
    return [number for number, layer in enumerate(layers) if layer.name in cut_at]


def sizes_with_cuts(costs: Sequence[float], num_stages: int, places: Sequence[int]) -> list[int]:
    """Return the sizes of stages that begin at these places; the costliest parts are cut further.

    >>> sizes_with_cuts([1, 1, 1, 1, 1, 1], 3, [2])
    [2, 2, 2]
    """
    parts = [costs[a:b] for a, b in pairwise([0, *places, len(costs)])]
    counts = [1] * len(parts)
    for _ in range(num_stages - len(parts)):
        open_parts = [i for i, part in enumerate(parts) if counts[i] < len(part)]
        if not open_parts:
            raise ModelError(
                f"cut_at leaves no place for the rest of {num_stages} stages: use fewer ranks"
            )
        counts[max(open_parts, key=lambda i: sum(parts[i]) / counts[i])] += 1
    pairs = zip(parts, counts, strict=True)
    return [size for part, count in pairs for size in balanced_sizes(part, count)]


def _check_balance(balance: object, num_layers: int, num_stages: int) -> None:
    sizes = list(balance) if isinstance(balance, Sequence) else []
    are_sizes = all(type(size) is int and size > 0 for size in sizes)
    if not are_sizes or (len(sizes), sum(sizes)) != (num_stages, num_layers):
        raise ModelError(
            f"balance is {balance!r}, but {num_layers} layers on {num_stages} stages need "
            f"{num_stages} numbers from 1 up whose sum is {num_layers}"
        )


def layer_costs(layers: LayerSequence, sample: Mapping[str, Any] | None = None) -> list[float]:
    """Return FLOPs for the sample inputs, plus parameters, plus one so that each has a cost."""
    sizes = [sum(p.numel() for p in layer.module.parameters()) for layer in layers.layers]
    # sharded weights are gathered, by hooks, in every forward
    may_run = not any(map(is_sharded_module, layers.modules.modules()))
    flops = forward_flops(layers, sample) if sample is not None and may_run else None
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
