"""Switch dropout of any model on or off, wherever the model keeps its rates."""

from __future__ import annotations

from typing import Any

from torch import nn

RATE = 0.1


def set_dropout(model: nn.Module, rate: float) -> int:
    """Set every rate of dropout and stochastic depth; return how many there are.

    Rates are in modules of torch, in numbers that modules keep, such as `attention_dropout`, and in
    configurations of transformers. Dropping whole layers by a Python branch ("layerdrop") is not
    among them: it stays off, since it changes which layers run.
    """
    configurations = {id(c): c for m in model.modules() if (c := getattr(m, "config", None))}
    holders = [*model.modules(), *configurations.values()]
    return sum(_set_rates(holder, rate) for holder in holders)


def _set_rates(holder: Any, rate: float) -> int:
    names = [
        name
        for name, value in vars(holder).items()
        if isinstance(value, float) and (name == "p" or ("drop" in name and "layer" not in name))
    ]
    for name in names:
        setattr(holder, name, rate)
    return len(names) * isinstance(holder, nn.Module)
