"""Selective recomputation: keep the results of costly operators from a forward to its second run.

    forward         x ─► linear ─► y ─► gelu ─► z ─► linear ─► …     y is kept, z is not
    recomputation   x              y ─► gelu ─► z                    only the gelu runs again

Products of matrices, convolutions and attention take nearly all of a forward's time, and their
results are about half of what it saves for the backward. The second forward takes each result in
the order in which the first one made it, layer by layer, and so frees it as a forward does. Where
it does not make the same call, or where the result was changed in place since, the operator runs
again: the bits are the same. Changes are seen if torch runs them, not if NumPy does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from stageline.model import trees
from stageline.torch_private import (
    FakeTensor,
    TorchDispatchMode,
    operator_schema,
    storage_identity,
    version_of,
)
from stageline.torch_private_training import skipped_by_compiler

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


class Result:
    """What one call returned: tensors and other values. State: none of them, if it is forgotten.

    A forgotten result keeps its place in the order of calls, but no memory.
    """

    def __init__(self, operator: Any, form: list[Any], returned: Any) -> None:
        self.operator, self.form = operator, form  # the form of the arguments
        self.is_tuple = isinstance(returned, tuple)
        self.values: tuple[Any, ...] = returned if self.is_tuple else (returned,)
        self.versions = [version_of(tensor) for tensor in self.tensors]
        self.memory = [storage_identity(tensor) for tensor in self.tensors]

    @property
    def tensors(self) -> list[Tensor]:
        return [value for value in self.values if isinstance(value, Tensor)]

    @property
    def is_unchanged(self) -> bool:
        """Return whether no tensor was changed in place, or given other memory."""
        is_same = [version_of(tensor) for tensor in self.tensors] == self.versions
        return is_same and [storage_identity(tensor) for tensor in self.tensors] == self.memory

    def forget(self) -> None:
        self.values = ()

    def detach(self) -> None:
        """Let go of the graph, in the same memory; forget the result if it was changed."""
        self.values = tuple(map(_detached, self.values)) if self.is_unchanged else ()

    def take(self) -> Any:
        """Return what the call returned, and forget it; None if it was forgotten or changed."""
        self.detach()
        taken = self.values
        self.forget()
        if not taken:
            return None
        return taken if self.is_tuple else taken[0]


class KeptMemory:
    """The memory of all results that wait in a stage. State: by storage, the result in it.

    A version does not tell of every change: that of a product is not that of its reshaped result,
    nor that of its `.data`.
    """

    def __init__(self) -> None:
        self.by_storage: WeakValueDictionary[int, Result] = WeakValueDictionary()

    def add(self, result: Result) -> None:
        for storage in result.memory:
            self.by_storage[storage] = result

    def forget_written(self, tensors: Iterable[Tensor]) -> None:
        """Forget the results that a call has written into."""
        for tensor in tensors:
            if not _is_dense(tensor):  # its memory is that of parts, which are not known
                for result in list(self.by_storage.values()):
                    result.forget()
            elif (found := self.by_storage.get(storage_identity(tensor))) is not None:
                found.forget()


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
        for results in self.by_layer.values():
            for each in results:
                each.detach()


class KeepsResults:
    """What the mode below does. Torch hides a mode's own method from its compiler, at a price."""

    stage: Stage
    kept: KeptResults

    @skipped_by_compiler
    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs, traits, memory = kwargs or {}, traits_of(func), self.stage.kept_memory
        returned = func(*args, **kwargs)
        if traits.written:
            memory.forget_written(traits.written_tensors(args, kwargs))
        if traits.may_be_costly and is_costly(func, args, kwargs):
            result = Result(func, _form(args, kwargs), returned)
            self.kept.add(self.stage.running_layer, result)
            if torch.is_grad_enabled():
                memory.add(result)
            else:  # compiled code runs like this, and reuses memory without a call of torch
                result.forget()
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

    @skipped_by_compiler
    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs, found = kwargs or {}, None
        if traits_of(func).may_be_costly and is_costly(func, args, kwargs):
            found = self.next_result(func, _form(args, kwargs))
        taken = found.take() if found is not None else None
        return func(*args, **kwargs) if taken is None else taken

    def next_result(self, func: Any, form: list[Any]) -> Result | None:
        """Return the result of the same call in the first forward, or None if there was none."""
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
        return found


class TakingMode(TakesResults, TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Within it, costly operators return what was kept of them."""

    def __init__(self, stage: Stage, kept: KeptResults) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.stage, self.kept, self.places = stage, kept, {}

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return True, so that `CallerContext` does not carry it to other threads."""
        return True


class OperatorTraits(NamedTuple):
    """What the schema of an operator says of its calls."""

    name: str
    arguments: tuple[str, ...]
    written: tuple[tuple[int, str], ...]  # positions and names of arguments that it writes into
    may_be_costly: bool  # it computes products, and into no argument, as one with `out=` does

    def written_tensors(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
        for position, name in self.written:
            yield from trees.tensors(args[position] if position < len(args) else kwargs.get(name))


@cache
def traits_of(func: Any) -> OperatorTraits:
    """Return the traits of an operator; those that take functions have no schema."""
    schema = operator_schema(func)
    if schema is None:
        return OperatorTraits("", (), (), may_be_costly=False)
    written = tuple(
        (position, argument.name)
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    name: str = schema.name
    is_known = name in PRODUCTS or name == CONVOLUTION or ATTENTION in name
    may_be_costly = is_known and not written and "backward" not in name
    arguments = tuple(argument.name for argument in schema.arguments)
    return OperatorTraits(name, arguments, written, may_be_costly)


def is_costly(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether the result of an operator that may be costly is dear for its size.

    Attention that draws random numbers is not: later draws depend on its own. Nor are calls with
    tensors of other classes, such as parts of sharded ones.

    >>> import torch
    >>> wide, narrow = torch.ones(8, 256), torch.ones(8, 16)
    >>> is_costly(torch.ops.aten.mm.default, (wide, wide.t()), {})
    True
    >>> is_costly(torch.ops.aten.mm.default, (narrow, narrow.t()), {})
    False
    """
    name = traits_of(func).name
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    if not all(map(_is_dense, tensors)):
        return False
    if name in PRODUCTS:
        return int(args[PRODUCTS[name]].shape[-1]) >= LEAST_PRODUCTS_PER_VALUE
    if name == CONVOLUTION:
        return _products_of_convolution(*args) >= LEAST_PRODUCTS_PER_VALUE
    given = {**dict(zip(traits_of(func).arguments, args, strict=False)), **kwargs}
    return not given.get("dropout_p")


def _products_of_convolution(_: Tensor, weight: Tensor, *settings: Any) -> float:
    """Return how many products a value of the result is a sum of, at most."""
    *_unused, is_transposed, _output_padding, groups = settings
    if is_transposed:
        return weight[:, 0].numel() / int(groups)
    return weight[0].numel()


def _form(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return all that two calls have in common if they only differ in the numbers in tensors."""
    return [*map(_form_of, args), *((name, _form_of(value)) for name, value in kwargs.items())]


def _form_of(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    return value


def _is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor has memory of its own, and strides."""
    is_plain = type(tensor) in PLAIN and tensor.layout is torch.strided
    return is_plain and not tensor.is_nested


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value
