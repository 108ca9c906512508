"""Repeat random numbers where a layer's own `torch.utils.checkpoint` runs a function again.

A checkpoint keeps the state of torch's default generator for the second run, which is in the
backward. Layers draw from other generators, so the states of those are kept with the checkpoint,
one for each draw. It is found on the stack of the operator that draws; of checkpoints within each
other, all are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from inspect import unwrap
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction, checkpoint

CHECKPOINT = unwrap(checkpoint).__code__
REENTRANT = CheckpointFunction.forward.__code__  # with `use_reentrant=True`
PRESERVES = "preserve_rng_state"

Repeat = Callable[[Sequence[Tensor]], AbstractContextManager[Any]]


class RecomputedFunction:
    """A function that draws the same numbers again. State: the states of generators so far."""

    def __init__(self, function: Callable[..., Any], repeat: Repeat) -> None:
        self.function, self.repeat = function, repeat
        self.states: list[Tensor] = []

    def __call__(self, *args: Any) -> Any:
        with self.repeat(self.states):
            return self.function(*args)


def keep_for_recomputation(generator: torch.Generator, repeat: Repeat) -> None:
    """Let checkpoints that are running keep a state from which an operator is about to draw."""
    state: Tensor | None = None
    for function in _recomputed_functions(repeat):
        state = generator.get_state() if state is None else state
        function.states.append(state)


def _recomputed_functions(repeat: Repeat) -> Iterator[RecomputedFunction]:
    """Yield what the checkpoints on the stack will run again, the innermost first."""
    frame: FrameType | None = sys._getframe()  # noqa: SLF001  the stack without its source lines
    while frame is not None:
        if frame.f_code is REENTRANT:
            yield _of_reentrant(frame.f_locals["ctx"], repeat)
        elif frame.f_code is CHECKPOINT and (running := frame.f_locals.get("gen")) is not None:
            yield _of_checkpoint(running.gi_frame.f_locals["new_frame"], repeat)
        frame = frame.f_back


def _of_reentrant(context: Any, repeat: Repeat) -> RecomputedFunction:
    if not isinstance(context.run_function, RecomputedFunction):
        context.run_function = RecomputedFunction(context.run_function, repeat)
        context.preserve_rng_state = False
    found: RecomputedFunction = context.run_function
    return found


def _of_checkpoint(kept: Any, repeat: Repeat) -> RecomputedFunction:
    if not isinstance(kept.recompute_fn, RecomputedFunction):
        # It would set torch's default generator meanwhile, which threads share.
        function = kept.recompute_fn
        variables = zip(function.__code__.co_freevars, function.__closure__, strict=True)
        dict(variables)[PRESERVES].cell_contents = False
        kept.recompute_fn = RecomputedFunction(function, repeat)
    found: RecomputedFunction = kept.recompute_fn
    return found
