"""Record the operators below the functions that torch.vmap and torch.func transform.

torch.vmap(f)(x)     f runs on wrappers of x: its functions are not recorded, but
  └─ aten.mul(x, y)  the operators below are, on the tensors that they really work on
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from stageline.model import trees
from stageline.model.recording.interception.operator_watch import OperatorWatch
from stageline.model.recording.tape import Arguments
from stageline.model.recording.tape_writer import TapeWriter
from stageline.torch_private import TorchDispatchMode, version_of

MOVES_BATCH = torch.ops.aten.permute.default  # of a result of torch.vmap, outside of functions


class OperatorRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Writes operators on a tape. State: the tape's, and whether a transformed function runs."""

    def __init__(
        self,
        writer: TapeWriter,
        is_inside: Callable[[], bool],
        inside: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Record on the writer's tape, but nothing that is inside of a recorded call."""
        super().__init__()  # type: ignore[no-untyped-call]  # as well
        self.writer, self.is_inside, self.inside = writer, is_inside, inside
        self.is_transformed = False

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function within a transform of torch.func, and record its operators."""
        before, self.is_transformed = self.is_transformed, True
        try:
            return func(*args, **kwargs)
        finally:
            self.is_transformed = before

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        call = args, dict(kwargs or {})
        is_recorded = self.is_transformed or func is MOVES_BATCH
        if self.is_inside() or not is_recorded or not self.writer.can_follow(call):
            return self._run(func, call)
        given = trees.tensors(call)
        versions = [version_of(tensor) for tensor in given]
        watch = OperatorWatch()
        watch.see(func, args)
        result = self._run(func, call)
        after = zip(given, versions, strict=True)
        changed = [tensor for tensor, version in after if version_of(tensor) != version]
        if changed or trees.tensors(result):
            self.writer.write_function(func, call, result, changed, watch)
        return result

    def _run(self, func: Any, call: Arguments) -> Any:
        with self.inside():  # an operator is a function as well
            return func(*call[0], **call[1])
