"""What surrounds a call, and belongs to the caller's thread: layers see it in a plain loop.

`Ambient` is what a forward depends on. It goes with the step, so that a forward that is run again,
maybe after the caller has left a `with` block, sees the same. `Surroundings` is what all work for
the caller should see, backwards too; threads of ours enter it when they begin to work.

What a layer keeps in a `threading.local` cannot be carried: use a context variable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, overrides
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _python_dispatch as dispatch

DEVICE_TYPES = ("cpu", "cuda")
SMALLEST = 2.2250738585072014e-308  # below it, numbers are denormal
T = TypeVar("T")
Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


@dataclass(frozen=True)
class Ambient:
    """Autocast's data type by device type, where it is on; inference mode; hooks on what is saved.

    The hooks change neither shapes nor types, so they do not count when two are compared.
    """

    autocast: tuple[tuple[str, torch.dtype], ...]
    is_inference: bool = False
    hooks: Hooks | None = field(default=None, compare=False)

    @staticmethod
    def here() -> Ambient:
        """As it is in the calling thread."""
        return Ambient(
            tuple(
                (kind, torch.get_autocast_dtype(kind))
                for kind in DEVICE_TYPES
                if torch.is_autocast_enabled(kind)
            ),
            torch.is_inference_mode_enabled(),
            _hooks(),
        )

    def enter(self, around: ExitStack, *, grad: bool) -> None:
        """The same in another thread or at another time, with or without recording a graph."""
        if self.is_inference and not grad and not torch.is_inference_mode_enabled():
            around.enter_context(torch.inference_mode())
        if torch.is_grad_enabled() != grad:
            around.enter_context(torch.set_grad_enabled(grad))
        if grad and self.hooks is not None and _hooks() != self.hooks:
            around.enter_context(saved_tensors_hooks(*self.hooks))
        for kind, dtype in self.autocast:
            # its cache of casts is one for all threads, and each that leaves clears it
            around.enter_context(torch.autocast(kind, dtype, cache_enabled=False))
        for kind in DEVICE_TYPES:
            if torch.is_autocast_enabled(kind) and kind not in dict(self.autocast):
                around.enter_context(torch.autocast(kind, enabled=False))


@dataclass(frozen=True)
class Surroundings:
    """Context variables, the modes that see calls of torch, and how small numbers may become.

    Among the modes are those of `torch.device` and `torch.set_default_device`.
    """

    variables: Context
    function_modes: tuple[Any, ...]
    dispatch_modes: tuple[Any, ...]
    flushes_denormals: bool

    @staticmethod
    def here() -> Surroundings:
        """As they are in the calling thread."""
        own = (m for m in dispatch._get_current_dispatch_mode_stack() if not m.is_infra_mode())  # noqa: SLF001  there is no public way
        return Surroundings(
            copy_context(),
            tuple(overrides._get_current_function_mode_stack()),  # type: ignore[no-untyped-call]  # noqa: SLF001  as above
            tuple(own),
            SMALLEST * 0.5 == 0.0,
        )

    def run(self, act: Callable[..., T], *arguments: Any) -> T:
        """Act in the same surroundings, in another thread."""
        # a context can be in one thread at a time
        return self.variables.copy().run(self._run, act, arguments)

    def _run(self, act: Callable[..., T], arguments: tuple[Any, ...]) -> T:
        torch.set_flush_denormal(self.flushes_denormals)
        with _pushed(self.function_modes, overrides), _pushed(self.dispatch_modes, dispatch):
            return act(*arguments)


@contextmanager
def _pushed(modes: tuple[Any, ...], where: Any) -> Iterator[None]:
    """Without what a mode does when it is entered: that has happened, and is not to be undone."""
    for mode in modes:
        where._push_mode(mode)  # noqa: SLF001  there is no public way
    try:
        yield
    finally:
        for _ in modes:
            where._pop_mode()  # noqa: SLF001  as above


def _hooks() -> Hooks | None:
    """Those of the innermost `saved_tensors_hooks`, which are the ones that count."""
    found: Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(True)  # noqa: SLF001  there is no public way
    return found
