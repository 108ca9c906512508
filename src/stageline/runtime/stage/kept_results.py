"""Selective recomputation: keep the results of costly operators from a forward to its second run.

    forward         x ─► linear ─► y ─► gelu ─► z ─► linear ─► …     y is kept, z is not
    recomputation   x              y ─► gelu ─► z                    only the gelu runs again

Products of matrices, convolutions and attention take nearly all of a forward's time, and their
results are about half of what it saves for the backward. The second forward takes each result in
the order in which the first one made it, layer by layer. Where it does not make the same call, or
where the result was changed in place since, the operator runs again: the bits are the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from stageline.torch_private import FakeTensor, TorchDispatchMode, operator_schema, version_of

if TYPE_CHECKING:
    from stageline.runtime.stage.stage import Stage

# The argument over whose elements a result's element is a sum.
PRODUCTS = {
    "aten::mm": 0,
    "aten::addmm": 1,
    "aten::bmm": 0,
    "aten::baddbmm": 1,
}
CONVOLUTION = "aten::convolution"
ATTENTION = "_scaled_dot_product_"
# A result is kept if each of its values is a sum of at least so many products. On a CPU these take
# several ns, and an elementwise function 1 ns. The large product of queries and keys, a sum over
# the width of a head, is below it in most models.
LEAST_PRODUCTS_PER_VALUE = 100
PLAIN = (Tensor, nn.Parameter, FakeTensor)


class Result(NamedTuple):
    """What one call returned: tensors, with the versions that they had then, and other values."""

    operator: Any
    form: list[Any]  # of the arguments
    values: tuple[Any, ...]
    is_tuple: bool
    versions: list[int]

    @staticmethod
    def of(func: Any, form: list[Any], returned: Any) -> Result:
        values = returned if isinstance(returned, tuple) else (returned,)
        return Result(func, form, values, values is returned, _versions(values))

    @property
    def tensors(self) -> list[Tensor]:
        return [value for value in self.values if isinstance(value, Tensor)]

    @property
    def is_usable(self) -> bool:
        """Return whether it was kept, and no tensor was changed in place since."""
        return bool(self.values) and _versions(self.values) == self.versions

    def detached(self) -> Result:
        """Return the same without a graph, in the same memory; without values if it is not usable.

        So a convolution whose result a ReLU changes in place keeps its place in the order of calls,
        but no memory.
        """
        values = tuple(map(_detached, self.values)) if self.is_usable else ()
        return self._replace(values=values)


class KeptResults:
    """The results that a stage keeps of one forward. State: by layer, in the order of the calls."""

    def __init__(self) -> None:
        self.by_layer: dict[str, list[Result]] = {}

    @property
    def tensors(self) -> list[Tensor]:
        return [t for results in self.by_layer.values() for each in results for t in each.tensors]

    def add(self, layer: str, result: Result) -> None:
        self.by_layer.setdefault(layer, []).append(result)

    def finish(self) -> None:
        """Let go of the first forward's graph: what was made in it becomes a constant."""
        for layer, results in self.by_layer.items():
            self.by_layer[layer] = [each.detached() for each in results]


class KeepsResults:
    """What the mode below does. Torch hides a mode's own method from its compiler.

    That takes 10 µs a call, and imports the compiler at the first, which takes 5 s.
    """

    stage: Stage
    kept: KeptResults

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        returned = func(*args, **kwargs)
        if is_costly(func, args, kwargs):
            result = Result.of(func, _form(args, kwargs), returned)
            self.kept.add(self.stage.running_layer, result)
        return returned


class KeepingMode(KeepsResults, TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Within it, results of costly operators are kept."""

    def __init__(self, stage: Stage, kept: KeptResults) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.stage, self.kept = stage, kept

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return True, so that `CallerContext` does not carry it to other threads."""
        return True


class TakesResults:
    """What the mode below does; see `KeepsResults`. State: by layer, the place of the next call."""

    stage: Stage
    kept: KeptResults
    places: dict[str, int]

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        found = None
        if is_costly(func, args, kwargs):
            found = self.next_result(func, _form(args, kwargs))
        if found is None:
            return func(*args, **kwargs)
        taken = found.detached().values
        return taken if found.is_tuple else taken[0]

    def next_result(self, func: Any, form: list[Any]) -> Result | None:
        """Return the kept result of a call, or None if there is none that can be used."""
        layer = self.stage.running_layer
        place = self.places.get(layer, 0)
        results = self.kept.by_layer.get(layer, [])
        if place >= len(results):
            return None
        found = results[place]
        if found.operator is not func or found.form != form:
            self.places[layer] = len(results)  # another course of events: take none any more
            return None
        self.places[layer] = place + 1
        return found if found.is_usable else None


class TakingMode(TakesResults, TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Within it, costly operators return what was kept of them."""

    def __init__(self, stage: Stage, kept: KeptResults) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.stage, self.kept, self.places = stage, kept, {}

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return True, so that `CallerContext` does not carry it to other threads."""
        return True


def is_costly(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether the result of a call is dear to compute for its size.

    Attention that draws random numbers is not: later draws depend on its own. Nor are calls with
    tensors of other classes, such as parts of sharded ones.

    >>> import torch
    >>> wide, narrow = torch.ones(8, 256), torch.ones(8, 16)
    >>> is_costly(torch.ops.aten.mm.default, (wide, wide.t()), {})
    True
    >>> is_costly(torch.ops.aten.mm.default, (narrow, narrow.t()), {})
    False
    """
    name = _name(func)
    if not (name in PRODUCTS or name == CONVOLUTION or ATTENTION in name):
        return False
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    if not all(type(tensor) in PLAIN for tensor in tensors):
        return False
    if name in PRODUCTS:
        return int(args[PRODUCTS[name]].shape[-1]) >= LEAST_PRODUCTS_PER_VALUE
    if name == CONVOLUTION:
        return _products_of_convolution(*args) >= LEAST_PRODUCTS_PER_VALUE
    given = {**dict(zip(_argument_names(func), args, strict=False)), **kwargs}
    return "backward" not in name and not given.get("dropout_p")


def _products_of_convolution(_: Tensor, weight: Tensor, *settings: Any) -> float:
    """Return how many products a value of the result is a sum of, at most."""
    *_unused, is_transposed, _output_padding, groups = settings
    if is_transposed:
        return weight[:, 0].numel() / int(groups)
    return weight[0].numel()


@cache
def _name(func: Any) -> str:
    """Return the name of an operator, or nothing if it writes to its arguments, as `out=` does."""
    schema = operator_schema(func)
    return "" if schema is None or schema.is_mutable else schema.name


@cache
def _argument_names(func: Any) -> tuple[str, ...]:
    return tuple(argument.name for argument in operator_schema(func).arguments)


def _form(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return all that two calls have in common if they only differ in the numbers in tensors."""
    return [*map(_form_of, args), *((name, _form_of(value)) for name, value in kwargs.items())]


def _form_of(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    return value


def _versions(values: tuple[Any, ...]) -> list[int]:
    return [version_of(value) for value in values if isinstance(value, Tensor)]


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value
