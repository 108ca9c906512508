"""Give layers generators of their own where ranks are threads, which share torch's generators.

Layers must not draw from those, so random operators are intercepted and passed a generator of the
layer's own: below autograd, by the tag that torch gives them. Seeing every operator costs about
8 µs each, in Python, where ranks wait for each other. So a layer is observed in this way when it
first runs, and if it drew once more, and then no more than its random numbers need:

    it drew nothing                nothing is seen, as long as torch's own generator does not move
    it drew in nn.Dropout          as well, and its dropouts are replaced while it runs
    it drew in known functions     its functions are seen, at 2 µs each, and the operators in these
    it drew elsewhere              every operator is seen

Of the known functions, those that most layers call are not looked into: a dropout is computed as
torch computes it, with the layer's generator, and an attention without dropout draws nothing.

While functions are seen, torch's attention does not take its fast path, which has other bits. It
never does in training, so that is where functions are seen.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  as everybody calls it

from stageline.model.function_interceptor import FunctionInterceptor
from stageline.runtime.exactness.randomness.layer_randomness import LayerRandomness
from stageline.runtime.exactness.randomness.replaced_dropouts import ReplacedDropouts
from stageline.runtime.exactness.randomness.seeded_draws import (
    RandomKey,
    is_random,
    may_draw,
)
from stageline.torch_private import function_modes

NO_DROPOUTS = ReplacedDropouts(nn.Identity(), ())
FAST_IN_EVALUATION = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)
DRAWING: frozenset[Callable[..., Any]] = frozenset(
    {
        F.dropout,
        F.dropout1d,
        F.dropout2d,
        F.dropout3d,
        F.alpha_dropout,
        F.feature_alpha_dropout,
        F.rrelu,
        F.gumbel_softmax,
        F.scaled_dot_product_attention,
        F.multi_head_attention_forward,
        torch.dropout,
        torch.bernoulli,
        torch.multinomial,
        torch.normal,
        torch.rand,
        torch.rand_like,
        torch.randint,
        torch.randint_like,
        torch.randn,
        torch.randn_like,
        torch.randperm,
        Tensor.bernoulli,
        Tensor.bernoulli_,
        Tensor.exponential_,
        Tensor.multinomial,
        Tensor.normal_,
        Tensor.random_,
        Tensor.uniform_,
    }
)


class Drew(Enum):
    """Where a layer drew random numbers when it was observed."""

    NOTHING = "it drew none"
    SOMEWHERE = "it is not known yet where"
    IN_DROPOUTS = "in nn.Dropout modules that can be replaced"
    IN_FUNCTIONS = "in functions of DRAWING"
    ELSEWHERE = "also elsewhere"


class WatchedDraws:
    """Draws where other threads draw at the same time. State: observations, a count and two flags.

    A layer is observed anew if it is switched to training or the probability of a dropout in it
    changes. `trusts`: torch's default generators would show if a layer that drew nothing draws
    after all. `watches_all`: they have shown it.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        device: torch.device | None,  # noqa: ARG002  each operator tells
        shared: Container[nn.Module] = (),
    ) -> None:
        """Prepare for layers; `shared` are the modules that several layers have."""
        self.random_parts = {m: [p for p in m.modules() if is_random(p)] for m in modules}
        self.deterministic = {module for module in self.random_parts if not may_draw(module)}
        self.attention = {
            m: [p for p in m.modules() if isinstance(p, FAST_IN_EVALUATION)]
            for m in self.random_parts
        }
        self.dropouts = {m: ReplacedDropouts(m, shared) for m in self.random_parts}
        self.observed: dict[object, Drew] = {}
        self.trusts = True
        self.watches_all = False
        self.counts, self.num_draws = True, 0  # what is watched is as easily counted

    def of_layer(self, module: nn.Module, key: RandomKey) -> AbstractContextManager[Any]:
        if module in self.deterministic:
            return nullcontext()
        probabilities = [
            (part.training, getattr(part, "p", None), getattr(part, "dropout", None))
            for part in self.random_parts[module]
        ]
        mode = module.training, torch.is_grad_enabled(), tuple(probabilities)
        sees_functions = all(part.training for part in self.attention[module])
        dropouts = self.dropouts[module]
        return self._watched((module, mode), key, dropouts, sees_functions=sees_functions)

    def of_loss(self, loss_fn: object, key: RandomKey) -> AbstractContextManager[Any]:
        return self._watched(loss_fn, key, NO_DROPOUTS, sees_functions=True)

    def _watched(
        self, drawer: object, key: RandomKey, dropouts: ReplacedDropouts, *, sees_functions: bool
    ) -> AbstractContextManager[Any]:
        if not dropouts.are_current:
            dropouts.find()
            self.observed.pop(drawer, None)
        drew = None if self.watches_all else self.observed.get(drawer)
        if drew is Drew.NOTHING and self.trusts:
            return nullcontext()
        if drew is Drew.IN_DROPOUTS and self.trusts:
            return _Replacing(self, dropouts, key)
        if not sees_functions or drew is None or drew is Drew.ELSEWHERE:
            return self._all_operators(drawer, key)
        if drew is Drew.SOMEWHERE:
            return self._operators_and_functions(drawer, key, dropouts)
        return self._in_functions(drawer, key)

    @contextmanager
    def _all_operators(self, drawer: object, key: RandomKey) -> Iterator[None]:
        with LayerRandomness(key) as randomness:
            yield
        self.num_draws += randomness.drew
        if self.observed.get(drawer) is not Drew.ELSEWHERE:
            self.observed[drawer] = Drew.SOMEWHERE if randomness.drew else Drew.NOTHING

    @contextmanager
    def _operators_and_functions(
        self, drawer: object, key: RandomKey, dropouts: ReplacedDropouts
    ) -> Iterator[None]:
        with (
            LayerRandomness(key) as randomness,
            _DrawingFunctions(randomness),
            _Replacing(self, dropouts, key, randomness),
        ):
            yield
        if randomness.drew_elsewhere:
            self.observed[drawer] = Drew.ELSEWHERE
        elif randomness.drew_in_functions:
            self.observed[drawer] = Drew.IN_FUNCTIONS
        elif randomness.drew:
            self.observed[drawer] = Drew.IN_DROPOUTS

    @contextmanager
    def _in_functions(self, drawer: object, key: RandomKey) -> Iterator[None]:
        randomness = LayerRandomness(key)
        with _DrawingFunctions(randomness):
            yield
        self.num_draws += randomness.drew
        if randomness.drew and self.observed[drawer] is Drew.NOTHING:
            self.observed[drawer] = Drew.SOMEWHERE


class _Replacing:
    """Within it, a layer's dropouts draw by its key."""

    __slots__ = ("draws", "dropouts", "randomness")

    def __init__(
        self,
        draws: WatchedDraws,
        dropouts: ReplacedDropouts,
        key: RandomKey,
        randomness: LayerRandomness | None = None,
    ) -> None:
        self.draws, self.dropouts = draws, dropouts
        self.randomness = randomness or LayerRandomness(key)

    def __enter__(self) -> None:
        self.dropouts.replace(self.randomness.dropout)

    def __exit__(self, *_: object) -> None:
        self.dropouts.restore()
        self.draws.num_draws += self.randomness.drew


class _DrawingFunctions(FunctionInterceptor):
    """Runs functions that draw with all of their operators seen."""

    def __init__(self, randomness: LayerRandomness) -> None:
        super().__init__()
        self.randomness = randomness

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func not in DRAWING:
            return func(*args, **kwargs)
        if func is F.dropout and not function_modes():  # others would not see it called
            self.randomness.drew_in_functions = True
            return self.randomness.dropout(*args, **kwargs)
        if func is F.scaled_dot_product_attention and _draws_nothing(*args, **kwargs):
            # else it would run while it holds DEFAULT_GENERATOR, one thread after the other
            return func(*args, **kwargs)
        with self.randomness.in_function():
            return func(*args, **kwargs)


def _draws_nothing(query: Tensor, *others: Any, dropout_p: float = 0.0, **_: Any) -> bool:
    """Return whether an attention with these arguments, the fifth a dropout, draws nothing."""
    is_given_in_order = len(others) > 3
    return query.device.type == "cpu" and not (others[3] if is_given_in_order else dropout_p)
