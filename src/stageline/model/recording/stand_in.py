"""Return what stands for an opaque module's result: without its weights, if it can be.

A forward is recorded to learn which operations there are, so what its modules compute is of no
interest: on the meta device they cost nothing, and a model that fits in no memory is recorded as
well. A module whose code needs values, such as a router of experts, runs on a copy of its own.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from stageline.model import trees
from stageline.model.named_places import named_places
from stageline.model.recording.interception.operator_watch import OperatorWatch
from stageline.model.recording.preserved import Attributes
from stageline.model.recording.tape import InnerOutput
from stageline.torch_private import (
    buffer_table,
    parameter_table,
    storage_identity,
    version_of,
)


class ModuleCall(NamedTuple):
    """A module's result, and what it did with its arguments."""

    result: Any
    changed: list[Tensor]  # arguments that it changed in place
    views: list[Tensor]  # arguments whose memory tensors of the result have in another form
    # Tensors inside the module that others may take out of it: those that stand for an argument or
    # for a tensor of the result, those that its submodules returned, and those in attributes.
    stand_ins: list[tuple[Tensor, Tensor]]
    inner: list[tuple[InnerOutput, Tensor]]
    watch: OperatorWatch


def stand_in(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, real: bool
) -> ModuleCall:
    """Return the result of a module with zeros in it; `real`: with the values of its weights.

    What the module sets as attributes of its own, it has afterwards.
    """
    return _on_copy(module, args, kwargs) if real else _on_meta(module, args, kwargs)


def _on_meta(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ModuleCall:
    leaves, spec = trees.flatten((args, dict(kwargs)))
    metas = [_meta(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    pairs = [(m, leaf) for m, leaf in zip(metas, leaves, strict=True) if isinstance(m, Tensor)]
    versions = [version_of(meta) for meta, _ in pairs]
    places = list(named_places(module))
    tensors = {id(tensor): _meta(tensor) for _, tensor in places}
    state = {name: tensors[id(tensor)] for name, tensor in places}
    given, named = trees.unflatten(metas, spec)
    before = {part: Attributes(part) for part in module.modules()}
    try:
        with inner_outputs(module) as inner, OperatorWatch() as watch:
            result = functional_call(module, state, given, named, tie_weights=False)
        kept = list(_own_attributes(module, before, state.values()))
    finally:
        for attributes in before.values():
            attributes.restore()
    for part, key, value in kept:
        vars(part)[key] = value
    after = zip(pairs, versions, strict=True)
    changed = [leaf for (meta, leaf), version in after if version_of(meta) != version]
    device = pairs[0][1].device if pairs else None
    memory = RealMemory(pairs, trees.tensors(result), device)
    result = trees.map_leaves(memory.filled, result)
    inner += _in_attributes(module, kept)
    return ModuleCall(result, changed, memory.views, memory.pairs, inner, watch)


class RealMemory:
    """Makes tensors of zeros that share memory with each other as meta tensors do.

    State: the arguments and the tensors made so far, by the meta tensors that they stand for.
    """

    def __init__(
        self,
        arguments: list[tuple[Tensor, Tensor]],
        results: list[Tensor],
        device: torch.device | None,
    ) -> None:
        self.device = device
        self.pairs = list(arguments)
        self.views: list[Tensor] = []
        self.by_identity = {id(meta): real for meta, real in arguments}
        self.by_storage: dict[int, Tensor] = {}
        self.arguments = {storage_identity(meta): real for meta, real in arguments}
        for meta, real in arguments:
            if meta.stride() == real.stride():
                self.by_storage[storage_identity(meta)] = real
        self.uses = Counter(storage_identity(meta) for meta in {id(m): m for m in results}.values())

    def filled(self, meta: Any) -> Any:
        """Return the tensor that stands for a meta tensor; other items as they are."""
        if not isinstance(meta, Tensor):
            return meta
        if id(meta) not in self.by_identity:
            made = self._made(meta)
            self.by_identity[id(meta)] = made
            self.pairs.append((meta, made))
        return self.by_identity[id(meta)]

    def _made(self, meta: Tensor) -> Tensor:
        storage = storage_identity(meta)
        if storage not in {**self.by_storage, **self.arguments} and self.uses[storage] > 1:
            number = meta.untyped_storage().nbytes() // meta.element_size()
            made = torch.zeros(number, dtype=meta.dtype, device=self.device)
            self.by_storage[storage] = made.requires_grad_().clone() if meta.requires_grad else made
        found = self.by_storage.get(storage)
        if found is not None and _can_be_base(found, meta):
            base = found if meta.requires_grad else found.detach()
            offset = base.storage_offset() + meta.storage_offset()
            return base.as_strided(meta.size(), meta.stride(), offset)
        if storage in self.arguments:
            self.views.append(self.arguments[storage])
        return zeros_like(meta, self.device)


def _can_be_base(base: Tensor, meta: Tensor) -> bool:
    return base.dtype == meta.dtype and (base.requires_grad or not meta.requires_grad)


def _own_attributes(
    module: nn.Module, before: Mapping[nn.Module, Attributes], state: Iterable[Tensor]
) -> Iterator[tuple[nn.Module, str, Any]]:
    """Yield attributes that modules have set, other than those with meta weights in them."""
    weights = {id(tensor) for tensor in state}
    for part in module.modules():
        for key in before[part].changed_keys() if part in before else ():
            value = vars(part).get(key)
            tensors = trees.tensors(value)
            if tensors and not any(id(tensor) in weights for tensor in tensors):
                yield part, key, value


def _in_attributes(
    module: nn.Module, kept: Iterable[tuple[nn.Module, str, Any]]
) -> Iterator[tuple[InnerOutput, Tensor]]:
    paths = {part: name for name, part in module.named_modules()}
    for part, key, value in kept:
        for leaf, tensor in enumerate(trees.tensors(value)):
            yield InnerOutput(paths[part], 0, leaf, key), tensor


def _on_copy(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ModuleCall:
    """Run a copy that shares the module's weights, or has small random ones if they are on meta."""
    made = _copied(module)
    before = {part: Attributes(part) for part in made.modules()}
    tensors = trees.tensors((args, dict(kwargs)))
    versions = [version_of(tensor) for tensor in tensors]
    with inner_outputs(made) as inner, OperatorWatch() as watch:
        result = made(*args, **kwargs)
    after = zip(tensors, versions, strict=True)
    changed = [tensor for tensor, version in after if version_of(tensor) != version]
    originals = dict(zip(made.modules(), module.modules(), strict=False))
    found = _own_attributes(made, before, ())
    kept = [(originals[part], key, value) for part, key, value in found]
    for part, key, value in kept:
        vars(part)[key] = value
    inner += _in_attributes(module, kept)
    return ModuleCall(result, changed, [], [], inner, watch)


def _copied(module: nn.Module) -> nn.Module:
    """Return a copy with the same parameters; those on the meta device are made anew.

    A module that cannot be copied is returned itself: who records restores what it changes.
    """
    shared: dict[int, Tensor] = {id(p): p for p in module.parameters() if not p.is_meta}
    for part in module.modules():  # results of earlier calls, which torch does not copy
        held = trees.tensors([v for k, v in vars(part).items() if not k.startswith("_")])
        shared |= {id(tensor): tensor for tensor in held if not tensor.is_leaf}
    try:
        made = copy.deepcopy(module, {**shared})
    except Exception:  # traced modules and locks cannot be copied
        return module
    for part in made.modules():
        for table in (parameter_table(part), buffer_table(part)):
            for name, tensor in table.items():
                if tensor is not None and tensor.is_meta:
                    table[name] = _materialised(tensor)  # type: ignore[assignment]
    return made


@contextmanager
def inner_outputs(
    module: nn.Module, wanted: Collection[str] | None = None
) -> Iterator[list[tuple[InnerOutput, Tensor]]]:
    """Collect the tensors that submodules, all or those of these paths, return within the block."""
    parts = {part: name for name, part in module.named_modules() if part is not module}
    calls: Counter[str] = Counter()
    found: list[tuple[InnerOutput, Tensor]] = []

    def collect(part: nn.Module, _: Any, output: Any) -> None:
        path = parts[part]
        leaves = enumerate(trees.tensors(output))
        found.extend((InnerOutput(path, calls[path], i), leaf) for i, leaf in leaves)
        calls[path] += 1

    with ExitStack() as stack:
        for part, path in parts.items():
            if wanted is None or path in wanted:  # before hooks that take outputs or change them
                handle = part.register_forward_hook(collect, prepend=True)
                stack.callback(handle.remove)
        yield found


def _materialised(tensor: Tensor) -> Tensor:
    made = torch.zeros(tensor.shape, dtype=tensor.dtype)
    if made.is_floating_point():
        made.normal_(std=0.02)
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def _meta(tensor: Tensor) -> Tensor:
    made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
    if not tensor.requires_grad:
        return made
    made.requires_grad_()
    return nn.Parameter(made) if isinstance(tensor, nn.Parameter) else made.clone()


def zeros_like(meta: Tensor, device: torch.device | None) -> Tensor:
    """Return zeros; not as a leaf of the graph, which could not be changed in place."""
    made = torch.empty_strided(meta.size(), meta.stride(), dtype=meta.dtype, device=device)
    made.zero_()
    return made.requires_grad_().clone() if meta.requires_grad else made
