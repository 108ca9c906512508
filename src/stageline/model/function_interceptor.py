"""Intercept the calls of torch's functions within a `with` block."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

from torch.overrides import TorchFunctionMode


class FunctionInterceptor(TorchFunctionMode):
    """A mode in which `call` runs in place of each function of torch."""

    @abstractmethod
    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function, or something else in its place, and return the result."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return self.call(func, args, kwargs or {})
