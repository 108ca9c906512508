"""Give layers generators of their own where ranks are threads, which share torch's generators.

Layers must not draw from those, so random operators are intercepted and passed a generator of the
layer's own: below autograd, by the tag that torch gives them. Seeing every operator costs about
8 µs each, in Python, where ranks wait for each other. So a layer is observed in this way when it
first runs, and if it drew once more, and then no more than its random numbers need:

    it drew nothing                nothing is seen, as long as torch's own generator does not move
    it drew in known functions     its functions are seen, at 1 µs each, and the operators in these
    it drew elsewhere              every operator is seen

Of the known functions, those that most layers call are not looked into: a dropout is computed as
torch computes it, with the layer's generator, and an attention without dropout draws nothing.

While functions are seen, torch's attention does not take its fast path, which has other bits. It
never does in training, so that is where functions are seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from functools import cache, partial
from threading import Lock
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  as everybody calls it

from stageline.model.function_interceptor import FunctionInterceptor
from stageline.runtime.devices import default_generators
from stageline.runtime.exactness.randomness.recomputed_draws import keep_for_recomputation
from stageline.runtime.exactness.randomness.seeded_draws import (
    RandomKey,
    is_random,
    is_same_state,
    layer_seed,
    may_draw,
)
from stageline.torch_private import TorchDispatchMode, function_modes, takes_generator

DEFAULT_GENERATOR = Lock()  # guards torch's default generators, for operators that take no other
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
    IN_FUNCTIONS = "in functions of DRAWING"
    ELSEWHERE = "also elsewhere"


class WatchedDraws:
    """Draws where other threads draw at the same time. State: observations, a count and two flags.

    A layer is observed anew if it is switched to training or the probability of a dropout in it
    changes. `trusts`: torch's default generator would show if a layer that drew nothing draws after
    all. `watches_all`: it has shown it.
    """

    def __init__(self, modules: Iterable[nn.Module], device: torch.device | None) -> None:
        self.random_parts = {m: [p for p in m.modules() if is_random(p)] for m in modules}
        self.deterministic = {module for module in self.random_parts if not may_draw(module)}
        self.attention = {
            m: [p for p in m.modules() if isinstance(p, FAST_IN_EVALUATION)]
            for m in self.random_parts
        }
        self.observed: dict[object, Drew] = {}
        self.trusts = device is None or device.type == "cpu"
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
        return self._watched((module, mode), key, sees_functions=sees_functions)

    def of_loss(self, loss_fn: object, key: RandomKey) -> AbstractContextManager[Any]:
        return self._watched(loss_fn, key, sees_functions=True)

    def _watched(
        self, drawer: object, key: RandomKey, *, sees_functions: bool
    ) -> AbstractContextManager[Any]:
        drew = None if self.watches_all else self.observed.get(drawer)
        if drew is Drew.NOTHING and self.trusts:
            return nullcontext()
        if not sees_functions or drew is None or drew is Drew.ELSEWHERE:
            return self._all_operators(drawer, key)
        if drew is Drew.SOMEWHERE:
            return self._operators_and_functions(drawer, key)
        return self._in_functions(drawer, key)

    @contextmanager
    def _all_operators(self, drawer: object, key: RandomKey) -> Iterator[None]:
        with LayerRandomness(key) as randomness:
            yield
        self.num_draws += randomness.drew
        if self.observed.get(drawer) is not Drew.ELSEWHERE:
            self.observed[drawer] = Drew.SOMEWHERE if randomness.drew else Drew.NOTHING

    @contextmanager
    def _operators_and_functions(self, drawer: object, key: RandomKey) -> Iterator[None]:
        with LayerRandomness(key) as randomness, _DrawingFunctions(randomness):
            yield
        self.num_draws += randomness.drew
        if randomness.drew:
            is_elsewhere = randomness.drew_elsewhere
            self.observed[drawer] = Drew.ELSEWHERE if is_elsewhere else Drew.IN_FUNCTIONS

    @contextmanager
    def _in_functions(self, drawer: object, key: RandomKey) -> Iterator[None]:
        randomness = LayerRandomness(key)
        with _DrawingFunctions(randomness):
            yield
        self.num_draws += randomness.drew
        if randomness.drew and self.observed[drawer] is Drew.NOTHING:
            self.observed[drawer] = Drew.SOMEWHERE


class _DrawingFunctions(FunctionInterceptor):
    """Runs functions that draw with all of their operators seen."""

    def __init__(self, randomness: LayerRandomness) -> None:
        super().__init__()
        self.randomness = randomness

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func not in DRAWING:
            return func(*args, **kwargs)
        if func is F.dropout and not function_modes():  # others would not see it called
            return self._dropout(*args, **kwargs)
        if func is F.scaled_dot_product_attention and _draws_nothing(*args, **kwargs):
            # else it would run while it holds DEFAULT_GENERATOR, one thread after the other
            return func(*args, **kwargs)
        with self.randomness.in_function():
            return func(*args, **kwargs)

    def _dropout(  # with torch's arguments
        self,
        x: Tensor,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
    ) -> Tensor:
        """Return `F.dropout(x, …)`, bit for bit and with its graph.

        To see its operators costs 16 µs more, in Python, where ranks wait for each other.
        """
        if not (training and 0.0 < p < 1.0 and _is_plain(x)) or inplace:
            with self.randomness.in_function():
                return F.dropout(x, p, training, inplace)
        generator = self.randomness.dropout_generator(x.device)
        noise = torch.empty_like(x).bernoulli_(1 - p, generator=generator)
        return x * noise.div_(1 - p)


def _draws_nothing(query: Tensor, *others: Any, dropout_p: float = 0.0, **_: Any) -> bool:
    """Return whether an attention with these arguments, the fifth a dropout, draws nothing."""
    is_given_in_order = len(others) > 3
    return query.device.type == "cpu" and not (others[3] if is_given_in_order else dropout_p)


def _is_plain(x: Tensor) -> bool:
    """Return whether torch computes the dropout of a tensor from the four operators used here."""
    is_dense = x.layout is torch.strided and not x.is_nested and x.numel() > 0
    return type(x) is Tensor and x.device.type == "cpu" and is_dense


class LayerRandomness(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Within it, all random operators draw from a generator that is seeded by a layer's key.

    State: a generator for each device that was drawn on, whether any was, and whether that was
    outside of the functions that are known to draw. If states of generators are given, each
    operator draws from the next of them.
    """

    def __init__(self, key: RandomKey, states: Sequence[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.key, self.drew, self.drew_elsewhere = key, False, False
        self.is_entered = self.is_in_function = False
        self.states = iter(states)
        self.generators: dict[torch.device, torch.Generator] = {}

    def __enter__(self) -> Self:
        self.is_entered = True
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        self.is_entered = False
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    @contextmanager
    def in_function(self) -> Iterator[None]:
        """See the operators of a function that is known to draw."""
        self.is_in_function = True
        try:
            with nullcontext() if self.is_entered else self:
                yield
        finally:
            self.is_in_function = False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not _is_random_operator(func) or kwargs.get("generator"):
            return func(*args, **kwargs)
        generator = self._generator(_device(args, kwargs))
        if takes_generator(func):
            self._record_draw()
            return func(*args, **kwargs | {"generator": generator})
        # Attention is one of these, and draws only if it has a dropout.
        before = generator.get_state()
        result = _call_with_default(generator, lambda: func(*args, **kwargs))
        if not is_same_state(before, generator.get_state()):
            self._record_draw()
        return result

    def _record_draw(self) -> None:
        self.drew = True
        self.drew_elsewhere = self.drew_elsewhere or not self.is_in_function

    def restart(self, key: RandomKey) -> None:
        """Draw from generators with another key from now on."""
        self.key = key
        self.generators.clear()

    def _generator(self, device: torch.device) -> torch.Generator:
        """Return the generator of a device, for an operator that is about to draw."""
        if device not in self.generators:
            self.generators[device] = torch.Generator(device).manual_seed(layer_seed(*self.key))
        generator = self.generators[device]
        if (state := next(self.states, None)) is not None:
            generator.set_state(state)
        keep_for_recomputation(generator, partial(LayerRandomness, self.key))
        return generator

    def dropout_generator(self, device: torch.device) -> torch.Generator:
        """Return the generator for a dropout that is computed outside of the mode."""
        self.drew = True
        return self._generator(device)


@cache
def _is_random_operator(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def _device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    tensors = (arg for arg in args if isinstance(arg, Tensor))
    found = next(tensors, None)
    return found.device if found is not None else torch.device(kwargs.get("device") or "cpu")


def _call_with_default(generator: torch.Generator, call: Callable[[], Any]) -> Any:
    """Give torch's default generator this one's state during a call that takes no generator."""
    default = default_generators(generator.device)[-1]
    with DEFAULT_GENERATOR:
        before = default.get_state()
        default.set_state(generator.get_state())
        try:
            return call()
        finally:
            generator.set_state(default.get_state())
            default.set_state(before)
