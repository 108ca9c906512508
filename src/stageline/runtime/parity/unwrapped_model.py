"""Run a recorded model's own forward, under the pipeline's rules for randomness and tied weights.

Nothing of the recording is used but the names of the layers. Where the model calls the module that
a layer is named after, the layer's random numbers begin, and its aliases of tied weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from stageline.model.layers import LayerSequence
from stageline.model.recording.call_arguments import call_arguments
from stageline.model.recording.tape import START
from stageline.runtime.exactness.randomness.layer_randomness import LayerRandomness
from stageline.runtime.exactness.randomness.seeded_draws import RandomKey
from stageline.torch_private import parameter_table

Enter = Callable[[int], None]


def run_unwrapped(
    layers: LayerSequence,
    part: Mapping[str, Any],
    key: Callable[[str], RandomKey],
    aliases: Mapping[int, Mapping[str, Tensor]],
    enter: Enter,
) -> Any:
    """Return the output of a micro-batch; `enter` is called with the number of each layer."""
    (model,) = layers.containers
    args, kwargs = call_arguments(model, part["inputs"], part["named"])
    names = [layer.name for layer in layers]
    randomness = LayerRandomness(key(names[0]))

    def begin(number: int) -> None:
        randomness.restart(key(names[number]))
        for name, alias in aliases.get(number, {}).items():
            _set_parameter(model, name, alias)
        enter(number)

    with _restored_parameters(model), _entered(model, names, begin), randomness:
        if names[0] == START:
            begin(0)
        return model(*args, **kwargs)


@contextmanager
def _entered(model: nn.Module, names: Sequence[str], begin: Enter) -> Iterator[None]:
    """Call `begin` where the model calls the module that a layer is named after."""
    calls: Counter[str] = Counter()
    inside: list[str] = []  # a layer's module may call that of another layer
    numbers = {name: number for number, name in enumerate(names)}

    def hook(name: str) -> Callable[..., None]:
        def count(*_: Any) -> None:
            calls[name] += not inside
            call = name if calls[name] == 1 else f"{name}@{calls[name]}"
            if call in numbers and not inside:
                begin(numbers[call])
            inside.append(name)

        return count

    handles = []
    for name in sorted({name.partition("@")[0] for name in names} - {START}):
        module = model.get_submodule(name)
        handles.append(module.register_forward_pre_hook(hook(name)))
        handles.append(
            module.register_forward_hook(lambda *_: inside.pop() and None, always_call=True)
        )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _restored_parameters(model: nn.Module) -> Iterator[None]:
    before = dict(model.named_parameters(remove_duplicate=False))
    try:
        yield
    finally:
        for name, parameter in before.items():
            _set_parameter(model, name, parameter)


def _set_parameter(model: nn.Module, name: str, tensor: Tensor) -> None:
    parent, _, own = name.rpartition(".")
    parameter_table(model.get_submodule(parent))[own] = tensor  # type: ignore[assignment]
