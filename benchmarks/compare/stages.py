"""Cut layers into modules as other libraries want them: tensors in, tensors out, nothing skipped.

    reads          source │ memory            │ query, memory    │ x, memory
    layers   ─► embed ────┼─► encoder.0 ──────┼─► embed_target ──┼─► decoder.0 ─► …
    alive at the cut   memory              memory            x, memory

A value that a later stage reads has to go through all stages between. Inputs of the model beside
the first are given to every stage by name, as torch.distributed.pipelining does with keywords.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from torch import Tensor, nn

import stageline as sl
from stageline.model.split import balanced_sizes, layer_costs

CHAIN = ("x",)


class Stage(nn.Module):
    """Consecutive layers: takes the values alive before them, returns those alive after them."""

    def __init__(
        self, layers: Sequence[sl.Layer], takes: tuple[str, ...], gives: tuple[str, ...]
    ) -> None:
        super().__init__()
        self.parts = nn.ModuleList(layer.module for layer in layers)
        self.layers = tuple(layers)
        self.takes, self.gives = takes, gives

    def forward(self, *values: Tensor, **inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        known = inputs | dict(zip(self.takes, values, strict=True))
        for layer in self.layers:
            result = layer.module(*(known[name] for name in layer.reads))
            known |= zip(layer.writes, layer.written(result), strict=True)
        given = tuple(known[name] for name in self.gives)
        return given if len(given) > 1 else given[0]


def stage_module(
    layers: Sequence[sl.Layer], takes: tuple[str, ...], gives: tuple[str, ...]
) -> nn.Module:
    """Return an `nn.Sequential` if that is enough, so that no peer pays for names."""
    if takes == gives == CHAIN and all(layer.reads == layer.writes == CHAIN for layer in layers):
        return nn.Sequential(*(layer.module for layer in layers))
    return Stage(layers, takes, gives)


def stage_modules(
    layers: sl.LayerSequence, first_input: str, balance: Sequence[int]
) -> list[nn.Module]:
    """Return a module for each stage; the first one takes the first input alone."""
    bounds = list(accumulate(balance, initial=0))
    alive = [alive_at(layers, place, first_input) for place in bounds[:-1]]
    alive = [*alive, (layers.output.name,)]
    parts = (layers.layers[a:b] for a, b in pairwise(bounds))
    return [
        stage_module(part, before, after)
        for part, (before, after) in zip(parts, pairwise(alive), strict=True)
    ]


def alive_at(layers: sl.LayerSequence, place: int, first_input: str) -> tuple[str, ...]:
    """Return the values that were written before a place, and are read after it.

    >>> chain = sl.LayerSequence.of(nn.Sequential(nn.ReLU(), nn.ReLU()))
    >>> alive_at(chain, 1, "x")
    ('x',)
    """
    read = {
        source
        for sources in layers.sources[place:]
        for source in sources
        if source.writer < place and (source.writer >= 0 or source.name == first_input)
    }
    return tuple(name for _, name in sorted(read))


def balance_of(layers: sl.LayerSequence, sample: dict[str, Tensor], num_stages: int) -> list[int]:
    """Return the cut that all contestants have: layers weighed by FLOPs and parameters."""
    return balanced_sizes(layer_costs(layers, sample), num_stages)


def equal_balance(num_layers: int, num_stages: int) -> list[int]:
    """Return equal numbers of layers, the larger ones first.

    >>> equal_balance(11, 2)
    [6, 5]
    """
    each, more = divmod(num_layers, num_stages)
    return [each + 1] * more + [each] * (num_stages - more)
