"""Turn a batch into the arguments of the model's own forward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from inspect import Parameter, Signature, signature
from typing import Any

from torch import nn

from stageline.errors import BatchError
from stageline.model.recording.tape import Arguments

NO_CACHE = "use_cache"  # caches of transformers' models are for generation, and hold tensors


def call_arguments(model: nn.Module, inputs: Any, named: Mapping[str, Any]) -> Arguments:
    """Return positional and named arguments: of a mapping by name, of a tuple in order.

    A mapping or tuple is the first argument as a whole if it does not fit the forward's parameters
    and the forward takes just one.

    >>> call_arguments(nn.Linear(2, 2), {"input": 1.0}, {})
    ((), {'input': 1.0})
    >>> call_arguments(nn.Linear(2, 2), 1.0, {})
    ((1.0,), {})
    """
    own = signature(model.forward)
    candidates = list(_candidates(own, inputs, named))
    for args, kwargs in candidates:
        if _fits(own, args, kwargs):
            return args, _without_cache(model, own, args, kwargs)
    args, kwargs = candidates[0]
    try:
        own.bind(*args, **kwargs)
    except TypeError as error:
        raise BatchError(
            f"the batch does not fit {type(model).__name__}.forward{own}: {error}; give a mapping "
            "with the names of its parameters, or a tuple in their order"
        ) from None
    raise AssertionError("a call that binds fits")


def _candidates(own: Signature, inputs: Any, named: Mapping[str, Any]) -> Iterator[Arguments]:
    is_mapping = isinstance(inputs, Mapping) and all(isinstance(key, str) for key in inputs)
    is_sequence = type(inputs) in (tuple, list)
    if is_mapping:
        yield (), {**inputs, **named}
    elif is_sequence:
        yield tuple(inputs), dict(named)
    if not (is_mapping or is_sequence) or len(own.parameters) == 1:
        yield ((), dict(named)) if inputs is None else ((inputs,), dict(named))


def _fits(own: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    try:
        own.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _without_cache(
    model: nn.Module, own: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Switch a cache off, if the forward has one and the batch does not say.

    A forward that passes any named argument on has one if a configuration in the model does.
    """
    passes_on = any(each.kind is Parameter.VAR_KEYWORD for each in own.parameters.values())
    has_cache = NO_CACHE in own.parameters or (passes_on and _is_configured(model))
    is_given = NO_CACHE in {**own.bind(*args, **kwargs).arguments, **kwargs}
    return kwargs | {NO_CACHE: False} if has_cache and not is_given else kwargs


def _is_configured(model: nn.Module) -> bool:
    """Return whether a model of transformers, or the language model inside of it, has a cache."""
    configurations = (getattr(part, "config", None) for part in model.modules())
    return hasattr(model, "config") and any(
        getattr(each, NO_CACHE, False) is True for each in configurations
    )
