"""Attributes that a forward only keeps notes in: it sets them anew before it reads them.

    self.features = []                 or: self.context = self.encoder(x)
    for block in self.blocks:              for block in self.blocks:
        self.features.append(block(x))         x = block(x) * self.context

A forward that does not depend on what the last one left behind is recorded the same from there. In
a pipeline nobody sets such attributes, since layers replay a tape. So what stands there afterwards
says so when it is used: a loss outside must not take an old value for a new one.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import FunctionType
from typing import Any, NoReturn

from torch import Tensor

from stageline.errors import ModelError
from stageline.model import trees
from stageline.model.recording.interception.constants import is_array
from stageline.model.recording.preserved import Change, unfrozen
from stageline.model.recording.tape import Operation, Tape, Template, shape_text
from stageline.torch_private import MODULE_TABLES

USES = (
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "matmul", "rmatmul"),
    *("neg", "pow", "float", "int", "bool", "len", "iter", "getitem", "call", "lt", "gt"),
)


class NotKept:
    """Stands where a forward has left a tensor, and refuses to be used as one."""

    def __init__(self, attribute: str) -> None:
        self.attribute = attribute

    @classmethod
    def __torch_function__(cls, _: Any, __: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        found = [leaf for leaf in trees.flatten((args, kwargs))[0] if isinstance(leaf, cls)]
        found[0].refuse()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self.refuse()

    def refuse(self, *_: Any) -> NoReturn:
        raise ModelError(
            f"{self.attribute!r} is set by the forward, but in a pipeline its layers run without "
            "setting it: let the forward return the value"
        )


for use in USES:
    setattr(NotKept, f"__{use}__", NotKept.refuse)


def are_scratch(before: tuple[Tape, list[Change]], after: tuple[Tape, list[Change]]) -> bool:
    """Return whether a forward that began with what it had left has done and left the same."""
    names = [[(change.module, change.key) for change in changes] for _, changes in (before, after)]
    pairs = zip(before[1], after[1], strict=False)
    return (
        names[0] == names[1]
        and not any(change.key in MODULE_TABLES for change in after[1])
        and all(_left_the_same(unfrozen(a.frozen), unfrozen(b.frozen)) for a, b in pairs)
        and _same_tape(before[0], after[0])
    )


def leave_not_kept(changes: Sequence[Change], names: Sequence[str]) -> None:
    """Set attributes to what the forward has left there, without its tensors."""
    for change, name in zip(changes, names, strict=True):
        leaves, spec = trees.flatten(unfrozen(change.frozen))
        left = [NotKept(name) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        made, held = trees.unflatten(left, spec), change.value
        if isinstance(held, list):
            held[:] = made
        elif isinstance(held, dict):
            held.clear()
            held.update(made)
        else:
            vars(change.module)[change.key] = made


def _left_the_same(before: Any, after: Any) -> bool:
    """Return whether two values differ in nothing but tensors, of which there are some."""
    leaves, spec = trees.flatten(before)
    others, other_spec = trees.flatten(after)
    pairs = list(zip(leaves, others, strict=False))
    return (
        spec == other_spec
        and bool(trees.tensors(after))
        and not any(map(trees.hides_tensors, others))
        and all(
            shape_text(a) == shape_text(b)
            if isinstance(a, Tensor) and isinstance(b, Tensor)
            else _same(a, b)
            for a, b in pairs
        )
    )


def _same_tape(a: Tape, b: Tape) -> bool:
    pairs = zip(a.operations, b.operations, strict=False)
    return (
        len(a.operations) == len(b.operations)
        and _same_template(a.output, b.output)
        and all(_same_operation(*pair) for pair in pairs)
    )


def _same_operation(a: Operation, b: Operation) -> bool:
    return (
        (a.writes, a.renamed, a.context) == (b.writes, b.renamed, b.context)
        and _same(a.target, b.target)
        and len(a.constants) == len(b.constants)
        and all(map(_same, a.constants, b.constants))
        and _same_template(a.arguments, b.arguments)
    )


def _same_template(a: Template, b: Template) -> bool:
    return a.spec == b.spec and all(map(_same, a.leaves, b.leaves))


def _same(a: Any, b: Any) -> bool:
    """Return whether two constants of tapes are the same; tensors are if they are one."""
    if isinstance(a, Tensor) or isinstance(b, Tensor) or a is b:
        return a is b
    if isinstance(a, FunctionType) and isinstance(b, FunctionType):
        return a.__code__ is b.__code__
    if is_array([a]) and is_array([b]):
        return bool(a.tobytes() == b.tobytes())
    return type(a) is type(b) and bool(a == b)
