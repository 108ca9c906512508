"""`@skippable`: layers whose forward stashes tensors for later layers, or pops earlier ones.

    @skippable(stash=["trunk"])                  @skippable(pop=["trunk"])
    class Encode(nn.Module):                     class Decode(nn.Module):
        def forward(self, x):                        def forward(self, x):
            yield stash("trunk", x)                      trunk = yield pop("trunk")
            return self.conv(x)                          return self.conv(x) + trunk

It works in a plain `nn.Sequential` as well.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, ClassVar, Self

from torch import Tensor, nn

from stageline.errors import SkipError
from stageline.torchgpipe.skip.namespace import Namespace
from stageline.torchgpipe.skip.scope import SkipKey, stashed_skips
from stageline.torchgpipe.tensors import Tensors

DOES = {"stash": "stashes", "pop": "pops"}


class stash:  # noqa: N801  torchgpipe's name
    """A command for `yield` in a skippable forward: keep a tensor, or None, for a later layer."""

    __slots__ = ("name", "tensor")

    def __init__(self, name: str, tensor: Tensor | None) -> None:
        self.name, self.tensor = name, tensor


class pop:  # noqa: N801  torchgpipe's name
    """A command for `yield` in a skippable forward, which returns what an earlier layer stashed."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class Skippable(nn.Module):
    """A module that stashes and pops; classes decorated by `skippable` derive from it."""

    module_cls: ClassVar[type[nn.Module]]
    stashable_names: ClassVar[frozenset[str]]
    poppable_names: ClassVar[frozenset[str]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.module = self.module_cls(*args, **kwargs)
        self.namespaces: dict[str, Namespace] = {}

    def __repr__(self) -> str:
        return f"@skippable({self.module})"

    def namespaced(self, name: str) -> SkipKey:
        """Return the skip that a name of this module stands for."""
        return SkipKey(self.namespaces.get(name), name)

    def stashable(self) -> Iterator[SkipKey]:
        """Yield the skips that the forward stashes, in the same order in every process."""
        return map(self.namespaced, sorted(self.stashable_names))

    def poppable(self) -> Iterator[SkipKey]:
        """Yield the skips that the forward pops, in the same order in every process."""
        return map(self.namespaced, sorted(self.poppable_names))

    def isolate(self, ns: Namespace, *, only: Iterable[str] | None = None) -> Self:
        """Move the skips of this module, or those named in `only`, into a namespace.

        Within one sequence, each name may be stashed and popped once per namespace.
        """
        names = self.stashable_names | self.poppable_names if only is None else only
        self.namespaces |= dict.fromkeys(names, ns)
        return self

    def forward(self, input: Tensors) -> Any:  # noqa: A002  torchgpipe's name
        waiting = stashed_skips()
        popped: dict[str, Tensor | None] = {}
        for key in self.poppable():
            if key not in waiting:
                raise SkipError(
                    f"{key.name!r} is popped, but was not stashed before: stash it in an earlier "
                    "layer, in the same namespace"
                )
            popped[key.name] = waiting.pop(key)
        new: dict[str, Tensor | None] = {}
        output = _followed(self.module(input), lambda command: self._obey(command, new, popped))
        self._check_complete(new, popped)
        waiting |= {self.namespaced(name): tensor for name, tensor in new.items()}
        return output

    def _obey(
        self, command: object, new: dict[str, Tensor | None], popped: dict[str, Tensor | None]
    ) -> Tensor | None:
        """Carry out a command; return what `yield` returns to the forward."""
        if isinstance(command, stash):
            self._check_declared(command.name, self.stashable_names, "stash")
            new[command.name] = command.tensor
            return None
        if isinstance(command, pop):
            self._check_declared(command.name, self.poppable_names, "pop")
            if command.name not in popped:
                raise SkipError(f"{command.name!r} is popped twice, but can be once: keep it")
            return popped.pop(command.name)
        raise TypeError(
            f"{type(self).__name__} yielded a {type(command).__name__}, but a skippable forward "
            "yields stash(name, tensor) or pop(name)"
        )

    def _check_declared(self, name: str, declared: frozenset[str], verb: str) -> None:
        if name not in declared:
            raise SkipError(
                f"{type(self).__name__} {DOES[verb]} {name!r}, but did not declare it: decorate it "
                f"with @skippable({verb}=[{name!r}])"
            )

    def _check_complete(
        self, new: dict[str, Tensor | None], left: dict[str, Tensor | None]
    ) -> None:
        missing = {"stash": self.stashable_names - new.keys(), "pop": frozenset(left)}
        for verb, names in missing.items():
            if names:
                listed = ", ".join(map(repr, sorted(names)))
                raise SkipError(
                    f"{type(self).__name__} declared that it {DOES[verb]} {listed}, but its "
                    f"forward did not: yield {verb} for each, on every way through it"
                )


def skippable(
    stash: Iterable[str] = (), pop: Iterable[str] = ()
) -> Callable[[type[nn.Module]], type[Skippable]]:
    """Return a class decorator that declares the skips which a module stashes and pops."""
    declared = {"stashable_names": frozenset(stash), "poppable_names": frozenset(pop)}

    def decorate(module_cls: type[nn.Module]) -> type[Skippable]:
        names = ("__module__", "__qualname__", "__doc__")
        described = {name: getattr(module_cls, name) for name in names}
        members = {"module_cls": module_cls, **declared, **described}
        return type(module_cls.__name__, (Skippable,), members)

    return decorate


def _followed(result: Any, obey: Callable[[object], Tensor | None]) -> Any:
    """Return the output of a forward that may be a generator of commands."""
    if not isinstance(result, Generator):
        return result
    try:
        command = next(result)
        while True:
            command = result.send(obey(command))
    except StopIteration as stop:
        return stop.value
