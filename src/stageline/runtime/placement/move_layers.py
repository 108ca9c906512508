"""Layers that change ranks between two steps take with them all that training left there.

    rank 0 │ a b c ─► a b       c, its gradients and what the optimizer keeps for it go to rank 1;
    rank 1 │ d     ─► c d       rank 0 is left with c's shapes, on the meta device

What moves is tensors: a weight that several layers use goes to ranks that had none of them, and
stays as long as one of them is there. One at a time, so that little is held twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stageline.arguments import check_type
from stageline.errors import PlanError
from stageline.model.layers import Layer, LayerSequence
from stageline.runtime.backends.backend import Collectives
from stageline.runtime.optimizers.param_groups import is_on_host, options
from stageline.runtime.placement.materialise import parameter_or_buffer, replace, tensors_of

Options = list[dict[str, Any]]  # by parameter group


class Move(NamedTuple):
    """A tensor that other ranks use from now on, or fewer."""

    tensor: Tensor
    layers: tuple[Layer, ...]  # that use it
    source: int  # a rank that has it
    targets: tuple[int, ...]  # ranks that have it not yet
    leaves: bool  # no layer of this process uses it any more


def options_of(optimizer: Optimizer | None) -> Options | None:
    return None if optimizer is None else [options(group) for group in optimizer.param_groups]


def check_optimizer(
    optimizer: Optimizer | None, layers: LayerSequence, own: Iterable[nn.Parameter]
) -> None:
    """Raise unless it trains what this process has of the model."""
    if optimizer is not None:
        check_type("optimizer", optimizer, Optimizer, "give the one that you step", PlanError)
    names: dict[Tensor, str] = {}
    for layer in layers:
        for name, parameter in layer.module.named_parameters():
            names.setdefault(parameter, f"{layer.name}.{name}")
    groups = [] if optimizer is None else optimizer.param_groups
    held = {parameter for group in groups for parameter in group["params"]}
    for parameter in held:
        if parameter not in names:
            raise PlanError(
                f"the optimizer has a parameter of shape {tuple(parameter.shape)} that the "
                "pipeline does not have: make the optimizer from pipe.parameters()"
            )
    for parameter in own:
        if parameter.requires_grad and parameter not in held:
            raise PlanError(
                f"the optimizer does not have {names[parameter]!r}, but what it keeps for a "
                "parameter has to move with it: make it from pipe.parameters()"
            )


def check_room(
    moves: Iterable[Move],
    optimizer: Optimizer | None,
    everywhere: Iterable[Options | None],
    collectives: Collectives,
) -> None:
    """Raise if what moves cannot, or if this process has no place for it in its optimizer."""
    own = options_of(optimizer)
    expected = next((groups for groups in everywhere if groups is not None), None)
    if own is not None and expected is not None and own != expected:
        raise PlanError(
            f"{_difference(own, expected)} on another rank: make the same groups on all ranks, "
            "those without parameters too, so that layers can move"
        )
    for move in moves:
        if hasattr(move.tensor, "to_local"):
            raise PlanError(
                f"layer {move.layers[0].name!r} has a tensor that several processes hold in parts, "
                "but only whole ones can move: set the balance when the pipeline is made"
            )
        arrives = any(map(collectives.has, move.targets))
        if arrives and own is None and expected is not None and move.tensor.requires_grad:
            raise PlanError(
                f"layer {move.layers[0].name!r} would move to a rank without an optimizer: make "
                "one there too, with [{'params': pipe.parameters()}], which may be empty"
            )


def _difference(own: Options, expected: Options) -> str:
    """The first, between groups that are not the same."""
    if len(own) != len(expected):
        return f"the optimizer has {len(own)} groups, but {len(expected)}"
    number, here, there = next(
        (number, *pair)
        for number, pair in enumerate(zip(own, expected, strict=True))
        if pair[0] != pair[1]
    )
    key = next(key for key in here | there if here.get(key) != there.get(key))
    return f"{key} of the optimizer's group {number} is {here.get(key)}, but {there.get(key)}"


def moves_of(
    layers: LayerSequence, before: Sequence[int], after: Sequence[int], collectives: Collectives
) -> deque[Move]:
    """To or from this process, in the order of the layers; `before`, `after`: the layers' ranks.

    The order is the same in all processes, so that none waits for one that waits for it.
    """
    uses: dict[Tensor, list[int]] = {}
    for number, layer in enumerate(layers):
        for tensor in dict.fromkeys(tensors_of(layer.module)):
            uses.setdefault(tensor, []).append(number)
    found: deque[Move] = deque()
    for tensor, numbers in uses.items():
        old, new = {before[n] for n in numbers}, {after[n] for n in numbers}
        source = before[numbers[0]]
        is_concerned = any(map(collectives.has, {source} | (old ^ new)))
        if old != new and is_concerned and not all(map(collectives.has, old | new)):
            users = tuple(layers.layers[number] for number in numbers)
            leaves = not any(map(collectives.has, new))
            found.append(Move(tensor, users, source, tuple(sorted(new - old)), leaves))
    return found


class Luggage:
    """What the optimizer of this process keeps. State: the group and name of each parameter."""

    def __init__(self, optimizer: Optimizer | None) -> None:
        self.groups = [] if optimizer is None else optimizer.param_groups
        self.state: dict[Tensor, Any] = {} if optimizer is None else optimizer.state
        self.members: dict[Tensor, tuple[int, str | None]] = {}
        for number, group in enumerate(self.groups):
            names = group.get("param_names", [None] * len(group["params"]))
            pairs = zip(group["params"], names, strict=True)
            self.members |= {parameter: (number, name) for parameter, name in pairs}
            group["params"].clear()  # what leaves must not be held here
            names.clear()

    def packed(self, tensor: Tensor) -> dict[str, Any]:
        kept = {"member": self.members.get(tensor), "state": dict(self.state.get(tensor, {}))}
        return {"tensor": tensor, "grad": tensor.grad, **kept}

    def unpack(self, tensor: Tensor, parcel: Mapping[str, Any]) -> None:
        with torch.no_grad():
            tensor.copy_(parcel["tensor"])
        tensor.requires_grad_(parcel["tensor"].requires_grad)
        tensor.grad = _own(parcel["grad"])
        if parcel["member"] is not None:
            self.members[tensor] = tuple(parcel["member"])
        if parcel["state"]:
            self.state[tensor] = {key: _own(value) for key, value in parcel["state"].items()}

    def drop(self, tensor: Tensor) -> None:
        self.members.pop(tensor, None)
        self.state.pop(tensor, None)

    def put_back(self, parameters: Iterable[nn.Parameter]) -> None:
        """The groups stay, for schedulers hold them; their parameters are these, in this order."""
        for parameter in parameters:
            if parameter in self.members:
                number, name = self.members[parameter]
                self.groups[number]["params"].append(parameter)
                if name is not None:
                    self.groups[number].setdefault("param_names", []).append(name)


def exchange(moves: deque[Move], luggage: Luggage, collectives: Collectives) -> None:
    """Uses the moves up, and with them the last that holds what has left."""
    while moves:
        move = moves.popleft()
        for target in move.targets:
            if collectives.has(move.source):
                collectives.transfer(
                    luggage.packed(move.tensor), move.source, target, "layers that move"
                )
            elif collectives.has(target):
                parcel = collectives.transfer(None, move.source, target, "layers that move")
                luggage.unpack(_made_here(move), parcel)
        if move.leaves:
            luggage.drop(move.tensor)
            _put(move, torch.empty_like(move.tensor, device="meta"))


def to_devices(
    layers: LayerSequence,
    places: Mapping[int, torch.device | None],
    optimizer: Optimizer | None = None,
) -> None:
    """The layers with these numbers, and what an optimizer keeps for those that change theirs."""
    modules = {number: layers.layers[number].module for number in places}
    before = {p: p.device for module in modules.values() for p in module.parameters()}
    for number, module in modules.items():
        if places[number] is not None:
            module.to(places[number])
    if optimizer is not None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if before.get(parameter, parameter.device) != parameter.device:
                    follow(optimizer.state.get(parameter, {}), group, parameter.device)


def follow(state: dict[str, Any], group: Mapping[str, Any], device: torch.device) -> None:
    """What an optimizer keeps for a parameter is on its device, but for the count of steps."""
    for key, value in state.items():
        if isinstance(value, Tensor) and not is_on_host(key, group):
            state[key] = value.to(device)


def _made_here(move: Move) -> Tensor:
    """The tensor that takes in what comes; a model that was not built on meta has one already."""
    if not move.tensor.is_meta:
        return move.tensor
    return _put(move, torch.empty_like(move.tensor, device="cpu"))


def _put(move: Move, empty: Tensor) -> Tensor:
    """In the place of the tensor, in all layers that use it."""
    made = parameter_or_buffer(move.tensor, empty)
    for layer in move.layers:
        replace(layer.module, {move.tensor: made})
    return made


def _own(value: Any) -> Any:
    """What came in a message lies in its buffer, together with all else that came."""
    return value.detach().clone() if isinstance(value, Tensor) else value
