"""Choose which modules are never cut: the elements of lists of blocks, and what contains none.

    model ─┬─ embed            opaque: it contains no list of blocks
           ├─ layers ─┬─ 0     opaque: an element of a list of blocks
           │          └─ 1     opaque
           └─ head             opaque

Modules that contain opaque ones are transparent: their own code is recorded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from stageline.errors import ModelError
from stageline.model.recording.tape import Tape
from stageline.torch_private import child_table

LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
# A module without a list of blocks, such as a network whose parts are attributes, is opened if it
# has more than this share of all parameters.
LARGE = 0.25
SHORT = 3  # layers of torch that are a block together


def choose_opaque(
    model: nn.Module, opaque: Collection[str] = (), opened: Collection[str] = ()
) -> dict[str, nn.Module]:
    """Return the opaque modules by name: those that `opaque` names, and none that `opened` does."""
    known = dict(model.named_modules(remove_duplicate=False))
    _check_modules(known)
    for name in opaque:
        if name not in known or not name:
            raise ModelError(
                f"opaque has {name!r}, but the model has no module of that name: give names as in "
                "model.named_modules()"
            )
    choice = Choice(frozenset(opaque), frozenset(opened), LARGE * _size(model))
    return dict(_opaque_below("", model, choice))


def _check_modules(known: Mapping[str, nn.Module]) -> None:
    for name, module in known.items():
        if isinstance(module, torch.jit.ScriptModule):
            raise ModelError(
                f"{name!r} is scripted or traced, so that nothing can take the place of its "
                "weights: use the module it was made from (torch.compile may be applied to it)"
            )
        if any(isinstance(p, UninitializedParameter) for p in module.parameters(recurse=False)):
            raise ModelError(
                f"{name!r} is a {type(module).__name__}, whose weights have no shape before it has "
                "run: call the model once on a batch before"
            )


def openable(name: str, module: nn.Module, opaque: Collection[str]) -> bool:
    """Return whether an opaque module could be cut: it has parts, and nobody asked to keep it."""
    num_parts = sum(_size(child) > 0 for _, child in _children(module))
    return name not in opaque and num_parts > 0 and not _is_of_torch(module)


def bypassed(opaque: Mapping[str, nn.Module], tape: Tape) -> set[str]:
    """Return opaque modules with parts that are not called as a whole, but are used."""
    called = {each.module for each in tape.operations}
    used = {name for each in tape.operations for name in each.arguments.state}
    return {
        name
        for name, module in opaque.items()
        if name not in called
        and any(True for _ in module.children())
        and any(each.startswith(f"{name}.") for each in used)
    }


class Choice(NamedTuple):
    """What decides whether a module is opaque, beside the module."""

    opaque: frozenset[str]
    opened: frozenset[str]
    large: float  # number of parameters from which on a module is opened


def _opaque_below(path: str, module: nn.Module, choice: Choice) -> Iterator[tuple[str, nn.Module]]:
    """Yield the opaque modules in a transparent one."""
    are_blocks = _is_list_of_blocks(module) and not _are_stages(module)
    for name, child in _children(module):
        full = f"{path}.{name}" if path else name
        below = any(each.startswith(f"{full}.") for each in (*choice.opaque, *choice.opened))
        is_block = are_blocks and not (isinstance(child, LISTS) and _contains_blocks(child))
        is_open = full in choice.opened or not (is_block or _is_closed(child, choice.large))
        if full not in choice.opaque and (below or is_open or not _is_callable(child)):
            yield from _opaque_below(full, child, choice)
        else:
            yield full, child


def _is_closed(module: nn.Module, large: float) -> bool:
    """Return whether a module, which is no element of a list of blocks, stays in one piece.

    A list or dict of modules is never called, so its elements are what may stay in one piece.
    """
    if _contains_blocks(module) or isinstance(module, nn.ModuleList | nn.ModuleDict):
        return False
    is_large = _size(module) > large
    has_parts = sum(_size(child) > 0 for _, child in _children(module)) > 1
    return not (is_large and has_parts and not _is_of_torch(module))


def _is_callable(module: nn.Module) -> bool:
    """Return whether a module has a forward; lists have none, so their elements are called."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def _is_of_torch(module: nn.Module) -> bool:
    """Return whether torch ships this module; its lists only run their elements."""
    return type(module).__module__.startswith("torch.nn.") and not isinstance(module, LISTS)


def _contains_blocks(module: nn.Module) -> bool:
    return any(_is_list_of_blocks(part) for part in module.modules())


def _is_list_of_blocks(module: nn.Module) -> bool:
    """Return whether it is a list with several elements of one class that have weights.

    Two or three layers of torch in a row are a block: the convolutions of a U-Net's level, the
    hidden layer of a head. More of them are a network, such as a VGG.
    """
    if not isinstance(module, LISTS):
        return False
    elements = [child for _, child in _children(module) if _size(child)]
    kinds = Counter(map(type, elements))
    is_small = isinstance(module, nn.Sequential) and not any(list(e.children()) for e in elements)
    return any(number > (SHORT if is_small else 1) for number in kinds.values())


def _are_stages(module: nn.Module) -> bool:
    """Return whether the elements of a list are themselves made of blocks, as in a Swin.

    Such elements grow in width from one to the next. Blocks with a list in them, such as that of
    experts, are alike, or some of them have no such list.
    """
    elements = [child for _, child in _children(module) if _size(child)]
    shapes = {tuple((n, tuple(p.shape)) for n, p in each.named_parameters()) for each in elements}
    return len(shapes) == len(elements) and all(map(_contains_blocks, elements))


def _children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return ((n, child) for n, child in child_table(module).items() if child is not None)


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
