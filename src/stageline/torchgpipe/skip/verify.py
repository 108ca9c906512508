"""Check that the layers of a sequence stash every skip once, and pop it once, later."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from stageline.torchgpipe.skip.scope import SkipKey
from stageline.torchgpipe.skip.skippable import Skippable


def verify_skippables(module: nn.Sequential) -> None:
    """Raise TypeError, with all mistakes, unless each skip has one stash and one later pop."""
    mistakes = [*_mistakes(module)]
    if mistakes:
        listed = "".join(f"\n  {mistake}" for mistake in mistakes)
        raise TypeError(
            "each skip has to be stashed by one layer and popped by one later layer, or isolated "
            f"in a namespace of its own, but:{listed}"
        )


def _mistakes(module: nn.Sequential) -> Iterator[str]:
    stashed: dict[SkipKey, str] = {}  # and the layers that do
    popped: dict[SkipKey, str] = {}
    for name, layer in module.named_children():
        if isinstance(layer, Skippable):
            yield from _mistakes_of_layer(name, layer, stashed, popped)
    for key, name in stashed.items():
        if key not in popped:
            yield f"layer {name!r} stashes {key.name!r}, which no later layer pops"


def _mistakes_of_layer(
    name: str, layer: Skippable, stashed: dict[SkipKey, str], popped: dict[SkipKey, str]
) -> Iterator[str]:
    """Yield the mistakes of a layer, and add its skips to those of the layers before it."""
    both = layer.stashable_names & layer.poppable_names
    yield from (f"layer {name!r} both stashes and pops {skip!r}" for skip in sorted(both))
    for key in (key for key in layer.poppable() if key.name not in both):
        if key in popped:
            yield f"layer {name!r} pops {key.name!r} again, after layer {popped[key]!r}"
        elif key not in stashed:
            yield f"layer {name!r} pops {key.name!r}, which no earlier layer stashes"
        else:
            popped[key] = name
    for key in (key for key in layer.stashable() if key.name not in both):
        if key in stashed:
            yield f"layer {name!r} stashes {key.name!r} again, after layer {stashed[key]!r}"
        else:
            stashed[key] = name
