"""Move layers to other ranks between two steps, with their gradients and optimizer states.

    rank 0 │ a b c ─► a b       c, its gradients and optimizer states move to rank 1;
    rank 1 │ d     ─► c d       rank 0 keeps c's shapes, on the meta device

A weight that several layers use is sent to ranks that had none of these layers, and stays on a rank
as long as one of them is there. Tensors move one at a time, so that few are in memory twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stageline.arguments import check_type
from stageline.errors import ModelError, PlanError
from stageline.model.layers import Layer, LayerSequence
from stageline.runtime.accelerators.accelerator import Accelerator
from stageline.runtime.accelerators.carry import carried
from stageline.runtime.backends.backend import Collectives
from stageline.runtime.optimizers.param_groups import group_options, is_on_host
from stageline.runtime.placement.materialise import parameter_or_buffer, replace, tensors_of

GroupsOptions = list[dict[str, Any]]  # the options of each parameter group


class TensorMove(NamedTuple):
    """A tensor whose set of ranks changes."""

    tensor: Tensor
    layers: tuple[Layer, ...]  # that use it
    source: int  # a rank that has it
    targets: tuple[int, ...]  # ranks that do not have it yet
    is_dropped: bool  # no layer of this process uses it any more


def options_of(optimizer: Optimizer | None) -> GroupsOptions | None:
    """Return the options of each parameter group; None without an optimizer."""
    return None if optimizer is None else [group_options(group) for group in optimizer.param_groups]


def check_optimizer(
    optimizer: Optimizer | None, layers: LayerSequence, own: Iterable[nn.Parameter]
) -> None:
    """Raise `PlanError` unless the optimizer has exactly the parameters of this process."""
    if optimizer is not None:
        check_type("optimizer", optimizer, Optimizer, "give the optimizer that you step", PlanError)
    names: dict[Tensor, str] = {}
    for layer in layers:
        for name, parameter in layer.module.named_parameters():
            names.setdefault(parameter, layer.full_name(name))
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
                f"the optimizer does not have {names[parameter]!r}, but the state of a parameter "
                "must move with it: make the optimizer from pipe.parameters()"
            )


def check_moves(
    moves: Iterable[TensorMove],
    optimizer: Optimizer | None,
    everywhere: Iterable[GroupsOptions | None],
    collectives: Collectives,
) -> None:
    """Raise `PlanError` if a tensor cannot move, or if this process's optimizer cannot take it.

    `everywhere` are the optimizer options of all processes.
    """
    own = options_of(optimizer)
    expected = next((groups for groups in everywhere if groups is not None), None)
    if own is not None and expected is not None and own != expected:
        raise PlanError(
            f"{_difference(own, expected)} on another rank: make the same groups on all ranks, "
            "including those without parameters, so that layers can move"
        )
    for move in moves:
        if hasattr(move.tensor, "to_local"):
            raise PlanError(
                f"layer {move.layers[0].name!r} has a DTensor, but only whole tensors can move: "
                "set the balance when the pipeline is made"
            )
        arrives = any(map(collectives.has, move.targets))
        if arrives and own is None and expected is not None and move.tensor.requires_grad:
            raise PlanError(
                f"layer {move.layers[0].name!r} would move to a rank without an optimizer: make "
                "one there too, with [{'params': pipe.parameters()}], which may be empty"
            )


def _difference(own: GroupsOptions, expected: GroupsOptions) -> str:
    """Describe the first difference between the groups of two ranks."""
    if len(own) != len(expected):
        return f"the optimizer has {len(own)} groups, but {len(expected)}"
    number, here, there = next(
        (number, *pair)
        for number, pair in enumerate(zip(own, expected, strict=True))
        if pair[0] != pair[1]
    )
    key = next(key for key in here | there if here.get(key) != there.get(key))
    return f"{key} of the optimizer's group {number} is {here.get(key)}, but {there.get(key)}"


def plan_moves(
    layers: LayerSequence, before: Sequence[int], after: Sequence[int], collectives: Collectives
) -> deque[TensorMove]:
    """Return the moves to or from this process; `before` and `after` are the layers' ranks.

    They are in the order of the layers, which is the same in all processes and avoids deadlocks.
    """
    uses: dict[Tensor, list[int]] = {}
    for number, layer in enumerate(layers):
        for tensor in dict.fromkeys(tensors_of(layer.module)):
            uses.setdefault(tensor, []).append(number)
    found: deque[TensorMove] = deque()
    for tensor, numbers in uses.items():
        old, new = {before[n] for n in numbers}, {after[n] for n in numbers}
        source = before[numbers[0]]
        is_involved = any(map(collectives.has, {source} | (old ^ new)))
        if old != new and is_involved and not all(map(collectives.has, old | new)):
            users = tuple(layers.layers[number] for number in numbers)
            is_dropped = not any(map(collectives.has, new))
            found.append(TensorMove(tensor, users, source, tuple(sorted(new - old)), is_dropped))
    return found


class OptimizerState:
    """The state of this process's optimizer while parameters move.

    State: the group and name of each parameter; the groups themselves are empty meanwhile.
    """

    def __init__(self, optimizer: Optimizer | None) -> None:
        self.groups = [] if optimizer is None else optimizer.param_groups
        self.state: dict[Tensor, Any] = {} if optimizer is None else optimizer.state
        self.members: dict[Tensor, tuple[int, str | None]] = {}
        for number, group in enumerate(self.groups):
            names = group.get("param_names", [None] * len(group["params"]))
            pairs = zip(group["params"], names, strict=True)
            self.members |= {parameter: (number, name) for parameter, name in pairs}
            group["params"].clear()  # so that tensors that leave are freed
            names.clear()

    def pack(self, tensor: Tensor) -> dict[str, Any]:
        """Return a tensor with its gradient, group and optimizer state."""
        kept = {"member": self.members.get(tensor), "state": dict(self.state.get(tensor, {}))}
        return {"tensor": tensor, "grad": tensor.grad, **kept}

    def unpack(self, tensor: Tensor, parcel: Mapping[str, Any]) -> None:
        """Copy what `pack` returned on another rank to a tensor and the optimizer."""
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

    def restore_groups(self, parameters: Iterable[nn.Parameter]) -> None:
        """Put these parameters into their groups, in this order.

        The groups stay the same objects, because schedulers refer to them.
        """
        for parameter in parameters:
            if parameter in self.members:
                number, name = self.members[parameter]
                self.groups[number]["params"].append(parameter)
                if name is not None:
                    self.groups[number].setdefault("param_names", []).append(name)


def move_tensors(moves: deque[TensorMove], state: OptimizerState, collectives: Collectives) -> None:
    """Perform the moves, and remove each from `moves` so that its tensor can be freed."""
    while moves:
        move = moves.popleft()
        for target in move.targets:
            if collectives.has(move.source):
                collectives.transfer(
                    state.pack(move.tensor), move.source, target, "layers that move"
                )
            elif collectives.has(target):
                parcel = collectives.transfer(None, move.source, target, "layers that move")
                state.unpack(_allocate(move), parcel)
        if move.is_dropped:
            state.drop(move.tensor)
            _replace(move, torch.empty_like(move.tensor, device="meta"))


def move_to_devices(
    layers: LayerSequence,
    devices: Mapping[int, torch.device | None],
    optimizer: Optimizer | None = None,
) -> None:
    """Move layers, by number, to devices, and the optimizer states of parameters that move."""
    modules = {number: layers.layers[number].module for number in devices}
    before = {p: p.device for module in modules.values() for p in module.parameters()}
    for number, module in modules.items():
        if devices[number] is not None:
            try:
                module.to(devices[number])
            except AssertionError as error:  # torch's own, if it was built without this device
                raise ModelError(
                    f"device {str(devices[number])!r} cannot be used: {error}: install a torch "
                    "that has it, or omit devices="
                ) from error
    if optimizer is not None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if before.get(parameter, parameter.device) != parameter.device:
                    state = optimizer.state.get(parameter, {})
                    move_state(state, group, parameter.device)


def carry_to_devices(
    layers: LayerSequence,
    before: Mapping[int, Accelerator | None],
    after: Mapping[int, Accelerator | None],
) -> None:
    """Bring tensors and gradients to the devices of their layers' new ranks, in this process.

    A tensor is where the first layer is that uses it. What `move_to_devices` moved stays.
    """
    seen: set[Tensor] = set()
    for number, target in after.items():
        ends = before.get(number, target), target
        for tensor in tensors_of(layers.layers[number].module):
            if tensor not in seen and ends[0] is not ends[1]:
                tensor.data = carried(tensor.data, *ends)
                tensor.grad = carried(tensor.grad, *ends)
            seen.add(tensor)


def move_state(state: dict[str, Any], group: Mapping[str, Any], device: torch.device) -> None:
    """Move a parameter's optimizer state to its device, except a step counter on the CPU."""
    for key, value in state.items():
        if isinstance(value, Tensor) and not is_on_host(key, group):
            state[key] = value.to(device)


def _allocate(move: TensorMove) -> Tensor:
    """Return the tensor to receive into; a model that was not built on meta has it already."""
    if not move.tensor.is_meta:
        return move.tensor
    return _replace(move, torch.empty_like(move.tensor, device="cpu"))


def _replace(move: TensorMove, empty: Tensor) -> Tensor:
    """Replace the tensor in all layers that use it, and return the new one."""
    made = parameter_or_buffer(move.tensor, empty)
    for layer in move.layers:
        replace(layer.module, {move.tensor: made})
    return made


def _own(value: Any) -> Any:
    """Return a copy: a received tensor is a view of the buffer of the whole message."""
    return value.detach().clone() if isinstance(value, Tensor) else value
