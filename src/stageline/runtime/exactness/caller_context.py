"""Carry the caller's thread-local settings to the threads and the times in which layers run.

In a plain loop a layer sees the caller's autocast, hooks, context variables and modes.
`ForwardContext` is what a forward depends on. It is stored with the step, so that a forward that is
run again, maybe after the caller has left a `with` block, sees the same. `CallerContext` is what
all work for the caller should see, backwards included; worker threads enter it when they start.

A `threading.local` of a layer cannot be carried over: use a context variable instead.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch.autograd.graph import saved_tensors_hooks

from stageline.model.device_settings import device_types
from stageline.torch_private import (
    SavedTensorHooks,
    active_modes,
    dispatch_modes,
    function_modes,
    saved_tensor_hooks,
)

SMALLEST_NORMAL = 2.2250738585072014e-308  # numbers below it are denormal
T = TypeVar("T")


@dataclass(frozen=True)
class ForwardContext:
    """The autocast data type by device type, inference mode, and hooks on saved tensors.

    The hooks change neither shapes nor types, so they do not count when two are compared.
    """

    autocast: tuple[tuple[str, torch.dtype], ...]
    is_inference: bool = False
    hooks: SavedTensorHooks | None = field(default=None, compare=False)

    @staticmethod
    def current() -> ForwardContext:
        """Return the context of the calling thread."""
        return ForwardContext(
            tuple(
                (kind, torch.get_autocast_dtype(kind))
                for kind in device_types()
                if torch.is_autocast_enabled(kind)
            ),
            torch.is_inference_mode_enabled(),
            saved_tensor_hooks(),
        )

    def enter(self, stack: ExitStack, *, grad: bool) -> None:
        """Enter the context in any thread, with or without recording a graph."""
        is_inference = self.is_inference and not grad
        if torch.is_inference_mode_enabled() != is_inference:
            stack.enter_context(torch.inference_mode(is_inference))
        if torch.is_grad_enabled() != grad:
            stack.enter_context(torch.set_grad_enabled(grad))
        if grad and self.hooks is not None and saved_tensor_hooks() != self.hooks:
            stack.enter_context(saved_tensors_hooks(*self.hooks))
        for kind, dtype in self.autocast:
            # all threads share one cache of casts, and each one that leaves clears it
            stack.enter_context(torch.autocast(kind, dtype, cache_enabled=False))
        for kind in device_types():
            if torch.is_autocast_enabled(kind) and kind not in dict(self.autocast):
                stack.enter_context(torch.autocast(kind, enabled=False))


def outside_autocast() -> AbstractContextManager[object]:
    """Return a context without the caller's autocast, for backwards, which torch wants outside.

    A forward enters it again. In it, backwards of layers that disable autocast themselves would
    compute in the lower type.
    """
    kinds = [kind for kind in device_types() if torch.is_autocast_enabled(kind)]
    if not kinds:
        return nullcontext()
    stack = ExitStack()
    for kind in kinds:
        stack.enter_context(torch.autocast(kind, enabled=False))
    return stack


@dataclass(frozen=True)
class CallerContext:
    """The caller's context variables, torch function and dispatch modes, and denormal flushing.

    `torch.device` and `torch.set_default_device` are among the modes.
    """

    variables: Context
    function_modes: tuple[Any, ...]
    dispatch_modes: tuple[Any, ...]
    flushes_denormals: bool

    @staticmethod
    def current() -> CallerContext:
        """Return the context of the calling thread."""
        flushes_denormals = SMALLEST_NORMAL * 0.5 == 0.0
        return CallerContext(copy_context(), function_modes(), dispatch_modes(), flushes_denormals)

    def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function in this context, in another thread."""
        # a Context can be entered by one thread at a time
        return self.variables.copy().run(self._run, function, arguments)

    def _run(self, function: Callable[..., T], arguments: tuple[Any, ...]) -> T:
        torch.set_flush_denormal(self.flushes_denormals)
        with active_modes(self.function_modes, self.dispatch_modes):
            return function(*arguments)
