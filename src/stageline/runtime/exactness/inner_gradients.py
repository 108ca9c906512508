"""Layers that differentiate or transform functions themselves, inside a forward or a hook.

A gradient penalty, an inner step of meta-learning, `torch.func`, forward-mode differentiation, an
auxiliary loss with a backward of its own: all of them need the graph that torch records, and most
of them what it saves. So a stage is watched during its first step, in which it runs as a plain loop
runs it: nothing is caught for a backward in halves, and nothing that is saved is dropped. If it was
seen to differentiate, it goes on like that. One that begins in a later step runs its forward again,
or is refused if that would move its state twice.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from threading import RLock
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from stageline.errors import ModelError
from stageline.runtime.exactness.randomness import is_of_torch

DIFFERENTIATES: frozenset[Callable[..., Any]] = frozenset(
    {torch.autograd.grad, torch.autograd.backward, Tensor.backward}
)
# Names of torch's that enter its level of forward-mode differentiation, which all threads share.
FORWARD_MODE = frozenset({"jvp", "jacfwd", "hessian", "linearize", "dual_level", "make_dual"})
FORWARD_LEVEL = RLock()  # guards that level
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
NO_SAVED_TENSORS = "support saved tensor hooks"  # what torch.func says where there are some

Filled = list[tuple[Tensor, Tensor]]  # weights, and gradients that a forward brought them


@dataclass(frozen=True, eq=False)
class Buffer:
    """Where a buffer is found: it may be another tensor each time."""

    where: dict[str, Tensor | None]
    name: str


class RepeatForward(BaseException):
    """Raised inside a layer that does something for which its stage has to run in another way."""


class Inner:
    """What is known of the layers of a stage. State: what was seen of them, and since which step.

    `direct` are the numbers of layers whose functions are not caught. `differentiates`: something
    in a forward takes gradients or transforms functions, and needs what its graph saves. `fills`: a
    backward inside a forward adds to `.grad`.
    """

    def __init__(
        self, modules: Mapping[int, nn.Module] | None = None, untracked: Iterable[nn.Module] = ()
    ) -> None:
        self.modules = dict(modules or {})
        self.harmless = {n for n, module in self.modules.items() if is_harmless(module)}
        self.has_forward_mode = any(map(_has_forward_mode, self.modules.values()))
        parts = [part for module in self.modules.values() for part in module.modules()]
        apart = set(untracked)  # what their forward does to their buffers is undone at once
        self.buffers = [Buffer(p._buffers, n) for p in parts if p not in apart for n in p._buffers]  # noqa: SLF001
        self.moving: set[Buffer] = set()  # those that a forward changes in place
        self.slots = [(p._parameters, name) for p in parts for name in p._parameters]  # noqa: SLF001
        self.losses: dict[object, tuple[bool, bool]] = {}  # whether harmless, or in forward mode
        self.first_step: int | None = None
        self.is_watching = self.is_given = False
        self.direct: set[int] = set()
        self.differentiates = self.fills = False

    @staticmethod
    def given(direct: set[int]) -> Inner:
        """What is known from elsewhere, and does not change."""
        inner = Inner()
        inner.direct, inner.is_given = direct, True
        return inner

    def watches(self, step: int, loss_fn: Callable[..., Any] | None) -> bool:
        """Whether the stage is watched in this step, its first."""
        if self.first_step is None:
            self.first_step = step
        self.is_watching = step == self.first_step and not self.is_trusted(loss_fn)
        return self.is_watching

    def trust(self) -> None:
        """Watch no more."""
        self.first_step = -1

    def is_trusted(self, loss_fn: Callable[..., Any] | None) -> bool:
        """Whether nothing here can differentiate."""
        is_known = len(self.harmless) == len(self.modules)
        return is_known and (loss_fn is None or self._loss(loss_fn)[0])

    def is_caught(self, layer: int, step: int) -> bool:
        """Whether functions of a layer that use weights are caught in a step."""
        is_new = self.first_step is None or self.first_step == step
        return not self.is_direct(layer) and (self.is_harmless(layer) or not is_new)

    def is_direct(self, layer: int) -> bool:
        """Whether functions of a layer must not be caught."""
        return layer in self.direct

    def is_harmless(self, layer: int) -> bool:
        """Whether a layer is known to differentiate nothing, before it has run."""
        return layer in self.harmless

    @property
    def keeps_apart(self) -> bool:
        """Whether gradients that a forward brings are kept apart from those of backwards."""
        return self.is_watching or self.fills

    def note(self, layers: set[int]) -> None:
        """Something in the forward of these layers differentiates or transforms."""
        self.differentiates = True
        self.direct |= layers

    def note_hook(self) -> None:
        """Something takes gradients in a backward; it may be of any layer that is not harmless."""
        self.direct |= self.modules.keys() - self.harmless

    def fill(self) -> None:
        """Something in a forward added to gradients."""
        self.differentiates = self.fills = True

    def lacks(self, _: Any) -> Tensor:
        """Something in a forward needs what its graph would have saved."""
        self.differentiates = True
        raise RepeatForward

    def state(self) -> State:
        """Take down the buffers before a forward."""
        return State(self.buffers, self.moving)

    def weights(self, doubles: Iterable[Mapping[str, Tensor]]) -> list[Tensor]:
        """All weights that a forward may use, their doubles included."""
        found: list[Tensor | None] = [where[name] for where, name in self.slots]
        found += [double for each in doubles for double in each.values()]
        return list({id(weight): weight for weight in found if weight is not None}.values())

    def turn(self, loss_fn: Callable[..., Any] | None) -> AbstractContextManager[Any]:
        """Threads take turns around a forward that enters the level which they share."""
        enters = self.has_forward_mode or (loss_fn is not None and self._loss(loss_fn)[1])
        return FORWARD_LEVEL if enters else nullcontext()

    def _loss(self, loss_fn: Callable[..., Any]) -> tuple[bool, bool]:
        if loss_fn not in self.losses:
            if isinstance(loss_fn, nn.Module):
                known = is_harmless(loss_fn), _has_forward_mode(loss_fn)
            else:
                is_of_torch = getattr(loss_fn, "__module__", "") == "torch.nn.functional"
                known = is_of_torch, _mentions(loss_fn, set())
            self.losses[loss_fn] = known
        return self.losses[loss_fn]


def too_late() -> ModelError:
    """Say that a stage began to differentiate when its forward had already run."""
    return ModelError(
        "a hook or a function of the stage takes gradients during its backward, but took none in "
        "the first step, and parts of its graph are put off until the weights' turn: set gradients "
        "to zero and run the step again, which will put nothing off"
    )


def is_transformed(args: Iterable[Any]) -> bool:
    """Whether a function is called inside a transform of torch.func, or in forward mode."""
    if torch._C._functorch.maybe_current_level() is not None:  # noqa: SLF001  the only way to ask
        return True
    # the level is one for all threads, so a tensor has to tell whether it takes part
    return forward_ad._current_level >= 0 and any(  # noqa: SLF001
        forward_ad.unpack_dual(item).tangent is not None  # type: ignore[no-untyped-call]
        for item in args
        if isinstance(item, Tensor)
    )


def is_harmless(module: nn.Module) -> bool:
    """Only modules of torch.nn are known to differentiate nothing, if no hooks hang on them."""
    return all(
        is_of_torch(part) and not any(getattr(part, name) for name in HOOKS)
        for part in module.modules()
    )


@contextmanager
def filled_apart(weights: Iterable[Tensor]) -> Iterator[Filled]:
    """Put aside, one by one, the gradients that a backward inside a forward brings to weights."""
    found: Filled = []

    def put_aside(weight: Tensor) -> None:
        assert weight.grad is not None  # it was just added to
        found.append((weight, weight.grad))
        weight.grad = None

    before = [(weight, weight.grad) for weight in weights if weight.requires_grad]
    handles = [
        weight.register_post_accumulate_grad_hook(put_aside)  # type: ignore[no-untyped-call]
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


@contextmanager
def filled_never(weights: Iterable[Tensor], name: str) -> Iterator[Filled]:
    """Refuse a backward inside a forward that brings gradients to weights."""
    found = list(weights)
    before = [weight.grad for weight in found]
    versions = [_version(gradient) for gradient in before]
    yield []
    if any(
        weight.grad is not gradient or _version(gradient) != version
        for weight, gradient, version in zip(found, before, versions, strict=True)
    ):
        raise ModelError(
            f"a backward() inside the forward of {name!r} added to the gradients of weights, but "
            "none did in the first step, so these were not kept apart from those of other "
            "micro-batches: set gradients to zero and run the step again"
        )


def add_filled(filled: Filled) -> None:
    """Add what a forward brought, as autograd adds: when a plain loop has come to it."""
    with torch.no_grad():
        for weight, gradient in filled:
            weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)


class State:
    """Buffers as they are before a forward, with copies of those that are known to move."""

    def __init__(self, buffers: Iterable[Buffer], moving: Container[Buffer]) -> None:
        self.before = [
            (
                item,
                each,
                _version(each),
                each.clone() if each is not None and item in moving else None,
            )
            for item, each in ((item, item.where.get(item.name)) for item in buffers)
        ]

    @property
    def moved(self) -> set[Buffer]:
        """Those that were changed in place; one that was replaced is not."""
        return {item for item, each, version, _ in self.before if _version(each) != version}

    @torch.no_grad()
    def restore(self, layer: str) -> None:
        """Undo what a forward did to its buffers, or say that this cannot be done."""
        for item, buffer, version, copy in self.before:
            item.where[item.name] = buffer
            if buffer is not None and _version(buffer) != version:
                if copy is None:
                    raise ModelError(
                        f"{layer!r} takes gradients inside its forward, or uses a weight in "
                        "another way than before, and its stage has to run again, but has changed "
                        f"buffer {item.name!r}, as it did not in the first step: set gradients to "
                        "zero and run the step again"
                    )
                buffer.copy_(copy)


def _version(tensor: Tensor | None) -> int:
    return -1 if tensor is None or tensor.is_inference() else tensor._version  # noqa: SLF001


def _has_forward_mode(module: nn.Module) -> bool:
    """Whether the code of a module, or of functions that it names, may use forward mode."""
    seen: set[object] = set()
    parts = {type(part) for part in module.modules() if not is_of_torch(part)}
    functions = [
        item
        for part in parts
        for base in part.__mro__
        if not base.__module__.startswith("torch.")
        for item in vars(base).values()
    ]
    return any(_mentions(function, seen) for function in functions)


def _mentions(item: object, seen: set[object]) -> bool:
    item = getattr(item, "__func__", item)
    if not isinstance(item, FunctionType) or item in seen or item.__module__.startswith("torch."):
        return False
    seen.add(item)
    names = set(_names(item.__code__))
    if names & FORWARD_MODE:
        return True
    return any(_mentions(item.__globals__.get(name), seen) for name in names)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
