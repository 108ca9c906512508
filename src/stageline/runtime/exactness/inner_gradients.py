"""Layers that differentiate or transform functions themselves, inside a forward or a hook.

A gradient penalty, an inner step of meta-learning, `torch.func`, forward-mode differentiation, an
auxiliary loss with its own backward: all of them need the graph that torch records, and most of
them need what it saves. So a stage is observed during its first step, which it runs as a plain loop
does: no call is intercepted for a split backward, and no saved tensor is dropped. If it
differentiates, it continues to run like that. A stage that starts to differentiate in a later step
runs its forward again, or is refused if this would change its state twice.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import RLock
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from stageline.errors import ModelError
from stageline.runtime.exactness.randomness.seeded_draws import is_of_torch
from stageline.torch_private import (
    has_hooks,
    is_forward_mode_active,
    is_inside_transform,
    parameter_table,
    version_of,
)

DIFFERENTIATING: frozenset[Callable[..., Any]] = frozenset(
    {torch.autograd.grad, torch.autograd.backward, Tensor.backward}
)
# Functions of torch that enter its level of forward-mode differentiation, which all threads share.
FORWARD_MODE = frozenset({"jvp", "jacfwd", "hessian", "linearize", "dual_level", "make_dual"})
FORWARD_MODE_LOCK = RLock()  # guards that level
NO_SAVED_TENSORS = "support saved tensor hooks"  # torch.func's error where there are some

ForwardGradients = list[tuple[Tensor, Tensor]]  # weights, and gradients from inside a forward


class RepeatForward(BaseException):
    """Raised inside a layer whose stage has to run its forward again in another way."""


class InnerGradients:
    """Which layers of a stage take gradients themselves. State: the observations so far.

    `direct` are the numbers of layers whose calls are not intercepted. `differentiates`: something
    in a forward takes gradients or transforms functions, and needs what its graph saves.
    `accumulates`: a backward inside a forward adds to `.grad`.
    """

    def __init__(self, modules: Mapping[int, nn.Module] | None = None) -> None:
        self.modules = dict(modules or {})
        self.harmless = {n for n, module in self.modules.items() if never_differentiates(module)}
        self.has_forward_mode = any(map(_may_use_forward_mode, self.modules.values()))
        parts = [part for module in self.modules.values() for part in module.modules()]
        own = [parameter_table(part) for part in parts]
        self.parameters = [(table, name) for table in own for name in table]
        # by loss function: whether it never differentiates, and whether it may use forward mode
        self.losses: dict[object, tuple[bool, bool]] = {}
        self.first_step: int | None = None
        self.is_observing = self.is_fixed = False
        self.direct: set[int] = set()
        self.differentiates = self.accumulates = False

    @staticmethod
    def fixed(direct: set[int]) -> InnerGradients:
        """Return observations that were made elsewhere, and do not change."""
        inner = InnerGradients()
        inner.direct, inner.is_fixed = direct, True
        return inner

    def observes(self, step: int, loss_fn: Callable[..., Any] | None) -> bool:
        """Return whether the stage is observed in this step, which it is in its first."""
        if self.first_step is None:
            self.first_step = step
        self.is_observing = step == self.first_step and not self.is_trusted(loss_fn)
        return self.is_observing

    def stop_observing(self) -> None:
        """Treat every further step as one after the first."""
        self.first_step = -1

    def is_trusted(self, loss_fn: Callable[..., Any] | None) -> bool:
        """Return whether nothing in the stage can differentiate."""
        is_known = len(self.harmless) == len(self.modules)
        return is_known and (loss_fn is None or self._loss(loss_fn)[0])

    def is_intercepted(self, layer: int, step: int) -> bool:
        """Return whether a layer's calls that use weights are intercepted in a step."""
        is_new = self.first_step is None or self.first_step == step
        return not self.is_direct(layer) and (self.is_harmless(layer) or not is_new)

    def is_direct(self, layer: int) -> bool:
        """Return whether a layer's calls must not be intercepted."""
        return layer in self.direct

    def is_harmless(self, layer: int) -> bool:
        """Return whether a layer is known to differentiate nothing, before it has run."""
        return layer in self.harmless

    @property
    def collects(self) -> bool:
        """Return whether gradients from inside a forward are kept apart from those of backwards."""
        return self.is_observing or self.accumulates

    def record_differentiation(self, layers: set[int]) -> None:
        """Record that the forward of these layers differentiates or transforms."""
        self.differentiates = True
        self.direct |= layers

    def record_hook(self) -> None:
        """Record that a hook takes gradients in a backward; any layer not harmless may own it."""
        self.direct |= self.modules.keys() - self.harmless

    def record_accumulation(self) -> None:
        """Record that a backward inside a forward added to gradients."""
        self.differentiates = self.accumulates = True

    def need_saved_tensor(self, _: Any) -> Tensor:
        """Repeat the forward: a backward inside it needs a saved tensor that was dropped."""
        self.differentiates = True
        raise RepeatForward

    def weights(self, aliases: Iterable[Mapping[str, Tensor]]) -> list[Tensor]:
        """Return all weights that a forward may use, and their aliases; some maybe twice."""
        found = [weight for table, name in self.parameters if (weight := table[name]) is not None]
        return [*found, *(alias for each in aliases for alias in each.values())]

    def may_use_forward_mode(self, loss_fn: Callable[..., Any] | None) -> bool:
        """Return whether a forward needs `FORWARD_MODE_LOCK`."""
        return self.has_forward_mode or (loss_fn is not None and self._loss(loss_fn)[1])

    def _loss(self, loss_fn: Callable[..., Any]) -> tuple[bool, bool]:
        if loss_fn not in self.losses:
            if isinstance(loss_fn, nn.Module):
                known = never_differentiates(loss_fn), _may_use_forward_mode(loss_fn)
            else:
                is_of_torch = getattr(loss_fn, "__module__", "") == "torch.nn.functional"
                known = is_of_torch, _names_forward_mode(loss_fn, set())
            self.losses[loss_fn] = known
        return self.losses[loss_fn]


def late_differentiation() -> ModelError:
    """Return the error for a stage that starts to differentiate after its forward has run."""
    return ModelError(
        "a hook or a function of the stage takes gradients during its backward, but took none in "
        "the first step, and parts of its graph are deferred until the weights' gradients are "
        "computed: set gradients to zero and run the step again, which will defer nothing"
    )


def is_transformed(args: Iterable[Any]) -> bool:
    """Return whether a function is called inside a transform of torch.func or in forward mode."""
    if is_inside_transform():
        return True
    # the level of forward mode is shared by all threads, so the tensors tell whether they take part
    return is_forward_mode_active() and any(
        forward_ad.unpack_dual(item).tangent is not None  # type: ignore[no-untyped-call]
        for item in args
        if isinstance(item, Tensor)
    )


def never_differentiates(module: nn.Module) -> bool:
    """Return whether a module is known to differentiate nothing.

    This holds for modules of torch.nn without hooks.
    """
    return all(is_of_torch(part) and not has_hooks(part) for part in module.modules())


@contextmanager
def collected_gradients(weights: Iterable[Tensor]) -> Iterator[ForwardGradients]:
    """Collect the gradients that a backward inside a forward brings to weights, one by one."""
    found: ForwardGradients = []

    def collect(weight: Tensor) -> None:
        assert weight.grad is not None  # it was just added to
        found.append((weight, weight.grad))
        weight.grad = None

    once = {id(weight): weight for weight in weights}.values()
    before = [(weight, weight.grad) for weight in once if weight.requires_grad]
    handles = [
        weight.register_post_accumulate_grad_hook(collect)  # type: ignore[no-untyped-call]
        for weight, _ in before
    ]
    try:
        for weight, _ in before:
            weight.grad = None
        yield found
    finally:
        for handle in handles:
            handle.remove()
        for weight, gradient in before:
            weight.grad = gradient


class RefusedGradients:
    """The gradients of weights before a forward, which must not add to them."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.weights = weights
        self.before = [weight.grad for weight in weights]
        self.num_changes = _num_changes(self.before)

    def check(self, stage: str) -> None:
        """Raise ModelError if a backward inside the forward brought gradients to weights."""
        after = [weight.grad for weight in self.weights]
        if any(map(operator.is_not, self.before, after)) or _num_changes(after) != self.num_changes:
            raise ModelError(
                f"a backward() inside the forward of {stage!r} added to the gradients of weights, "
                "but none did in the first step, so these were not kept apart from those of other "
                "micro-batches: set gradients to zero and run the step again"
            )


def add_forward_gradients(gradients: ForwardGradients) -> None:
    """Add what a forward brought to weights, as autograd adds and when a plain loop would."""
    if not gradients:
        return
    with torch.no_grad():
        for weight, gradient in gradients:
            weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)


def _num_changes(gradients: Iterable[Tensor | None]) -> int:
    """Return how often gradients were changed in place, all together."""
    return sum([version_of(gradient) for gradient in gradients if gradient is not None])


def _may_use_forward_mode(module: nn.Module) -> bool:
    """Return whether the code of a module, or of functions that it names, names forward mode."""
    visited: set[object] = set()
    parts = {type(part) for part in module.modules() if not is_of_torch(part)}
    functions = [
        item
        for part in parts
        for base in part.__mro__
        if not (base.__module__ or "").startswith("torch.")
        for item in vars(base).values()
    ]
    return any(_names_forward_mode(function, visited) for function in functions)


def _names_forward_mode(item: object, visited: set[object]) -> bool:
    item = getattr(item, "__func__", item)
    if not isinstance(item, FunctionType) or item in visited:
        return False
    if (item.__module__ or "").startswith("torch."):
        return False
    visited.add(item)
    names = set(_names(item.__code__))
    if names & FORWARD_MODE:
        return True
    return any(_names_forward_mode(item.__globals__.get(name), visited) for name in names)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
