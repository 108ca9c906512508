"""Exchange the values and gradients of weights that layers on several ranks use."""

from __future__ import annotations

from torch import nn

from stageline.errors import ModelError
from stageline.runtime.backends.backend import Collectives
from stageline.runtime.exactness.tied_weights import TiedWeights
from stageline.runtime.placement.layout import Layout


def broadcast_weights(tied: TiedWeights, layout: Layout, collectives: Collectives) -> None:
    """Give all ranks that use a weight the values of the first one that does."""
    for weight, uses in tied.by_weight:
        ranks = [layout.rank_of_layer[number] for number, _ in uses]
        if _is_spread(ranks, collectives):
            found = collectives.broadcast(weight.detach(), ranks[0], "tied weights")
            if not weight.is_meta:
                weight.data.copy_(found)


def exchange_gradients(tied: TiedWeights, layout: Layout, collectives: Collectives) -> None:
    """Give all ranks that use a weight the gradients of all its uses."""
    spread = [
        (weight, uses)
        for weight, uses in tied.by_weight
        if _is_spread([layout.rank_of_layer[number] for number, _ in uses], collectives)
    ]
    if not spread:
        return
    what = "gradients of tied weights"
    hooked = collectives.gather([weight in tied.hooked for weight, _ in spread], what)
    for position, (_, uses) in enumerate(spread):
        is_hooked = {
            layout.rank_of_layer[number]: hooked[layout.rank_of_layer[number]][position]
            for number, _ in uses
        }
        _check_hooks(is_hooked)
        for number, alias in uses:
            own = (
                tied.gradients_by_microbatch.get(alias, {})
                if all(is_hooked.values())
                else alias.grad
            )
            found = collectives.broadcast(own, layout.rank_of_layer[number], what)
            if not alias.is_meta:  # it is used here as well
                _store(tied, alias, found)


def _store(tied: TiedWeights, alias: nn.Parameter, found: object) -> None:
    if isinstance(found, dict):  # of a weight with hooks: by micro-batch
        tied.gradients_by_microbatch[alias] = found
    else:
        alias.grad = found  # type: ignore[assignment]  # a tensor or None


def _is_spread(ranks: list[int], collectives: Collectives) -> bool:
    """Return whether a weight is used on several ranks that do not share memory."""
    return len(set(ranks)) > 1 and not all(map(collectives.has, ranks))


def _check_hooks(is_hooked: dict[int, bool]) -> None:
    if any(is_hooked.values()) and not all(is_hooked.values()):
        raise ModelError(
            "a weight that layers on several ranks use has hooks on "
            f"{[rank for rank, has_hooks in is_hooked.items() if has_hooks]} only, but is used on "
            f"{list(is_hooked)}: register hooks on all ranks"
        )
