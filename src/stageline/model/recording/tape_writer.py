"""Write a tape: name the tensors of a forward, and turn calls into operations on these names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from stageline.errors import ModelError
from stageline.model import trees
from stageline.model.recording.interception.constants import OWN_MODULE, constant, storages
from stageline.model.recording.interception.fresh_tensors import FreshTensors
from stageline.model.recording.interception.functions import function_name, may_hold_tensors
from stageline.model.recording.interception.operator_watch import OperatorWatch
from stageline.model.recording.interception.state import state_names, without_meta
from stageline.model.recording.interception.tracked_tensors import TakenOut, TrackedTensor
from stageline.model.recording.interception.value_marks import ValueMarks
from stageline.model.recording.preserved import raise_created
from stageline.model.recording.stand_in import ModuleCall, zeros_like
from stageline.model.recording.tape import (
    START,
    Arguments,
    Context,
    DeviceRef,
    Operation,
    Renaming,
    StateRef,
    Tape,
    Template,
    ValueRef,
    shape_text,
)
from stageline.torch_private import DropoutBase


class InputChangedError(Exception):
    """The forward changes a tensor of the batch in place, so it has to be given a copy."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class TapeWriter:
    """State: the operations so far, and the names of tensors."""

    def __init__(self, model: nn.Module, inputs: Mapping[str, Tensor]) -> None:
        self.inputs = inputs
        self.operations: list[Operation] = []
        self.inseparable: list[tuple[int, int]] = []
        self.tracked: dict[int, TrackedTensor] = {}
        self.taken_out: dict[int, TakenOut] = {}
        self.marks = ValueMarks()
        self.state = state_names(model)
        self.filled_state = without_meta(model, self.state)  # by what stands for it
        self.weights = storages(model.parameters())
        self.has_meta_weights = any(p.is_meta for p in model.parameters())
        self.buffers = storages(model.buffers())
        self.fresh = FreshTensors()
        self.constants: set[int] = set()  # the memory of tensors that are constants
        self.calls: Counter[str] = Counter()
        self.functions: Counter[str] = Counter()  # since the last call
        self.last_call = START
        self.line = ""  # of the model's code
        self.ambient = Context.current()
        first = next(iter(inputs.values()), None)
        self.device = torch.device("cpu") if first is None else first.device
        for name, tensor in inputs.items():
            self._track(tensor, name, -1)

    # Operations

    def write_module(
        self, name: str, module: nn.Module, arguments: Template, call: ModuleCall
    ) -> None:
        """Write a call of an opaque module."""
        self._check_result(name, call.result)
        self.calls[name] += 1
        self.last_call = name if self.calls[name] == 1 else f"{name}@{self.calls[name]}"
        self.functions.clear()
        leaves = trees.flatten(call.result)[0]
        names = self._names(self.last_call, leaves)
        dynamic = call.watch.has_dynamic_shapes
        marks = self.marks.inherited(arguments.values, layers=True, chance=False, dynamic=dynamic)
        is_random = any(isinstance(part, DropoutBase) for part in module.modules())
        is_random = is_random or call.watch.is_random
        number = len(self.operations)
        self._write(name, arguments, leaves, names, call.changed, marks, is_random)
        for argument in call.views:
            if id(argument) in self.tracked:
                self._keep_together(self.tracked[id(argument)].made_by, number)
        for tensor, real in call.stand_ins:
            self.taken_out[id(tensor)] = TakenOut(tensor, real, None, number)
        for inner, tensor in call.inner:
            self.taken_out.setdefault(id(tensor), TakenOut(tensor, None, inner, number))

    def write_function(
        self,
        func: Callable[..., Any],
        call: Arguments,
        result: Any,
        changed: list[Tensor],
        watch: OperatorWatch,
    ) -> None:
        """Write a call of a function that returns or changes tensors."""
        arguments = self.template(call, f"{function_name(func)} is called with")
        label = f"{self.last_call}+{function_name(func)}"
        self.functions[label] += 1
        suffix = f".{self.functions[label]}" if self.functions[label] > 1 else ""
        leaves = trees.flatten(result)[0] if may_hold_tensors(result) else []
        names = self._names(f"{label}{suffix}", leaves)
        marks = self.marks.inherited(
            arguments.values,
            layers=watch.is_random or bool(arguments.state),
            chance=watch.is_random,
            dynamic=watch.has_dynamic_shapes,
        )
        self._write(func, arguments, leaves, names, changed, marks, watch.is_random)

    def write_effect(self, func: Callable[..., Any], call: Arguments) -> None:
        """Write a call for what it does to tensors or their gradients, beside their values."""
        number = len(self.operations)
        arguments = self.template(call, f"{function_name(func)} is called with")
        self._write(func, arguments, [], [], [], [], False)
        for tensor in trees.tensors(call):
            if id(tensor) in self.tracked:
                self._keep_together(self.tracked[id(tensor)].made_by, number)

    def write_guard(self, func: Callable[..., Any], arguments: Template, result: Any) -> None:
        """Write what the model found in the values of a tensor, and went on by."""
        leaves, _ = trees.flatten(result)
        operation = Operation(
            func,
            arguments,
            (),
            constants=tuple(leaves),
            is_guard=True,
            by_chance=not self.marks.chance.isdisjoint(arguments.values),
            line=self.line,
        )
        self.operations.append(operation)

    def _names(self, label: str, leaves: list[Any]) -> list[str]:
        number = sum(isinstance(leaf, Tensor) for leaf in leaves)
        return [f"{label}[{place}]" for place in range(number)]

    def _write(
        self,
        target: str | Callable[..., Any],
        arguments: Template,
        leaves: list[Any],
        names: list[str],
        changed: list[Tensor],
        marks: list[set[str]],
        is_random: bool,
    ) -> None:
        number = len(self.operations)
        renamed = self._rename_changed(changed, number, marks)
        for marked in marks:
            marked.update(names)
        outputs, context = [leaf for leaf in leaves if isinstance(leaf, Tensor)], Context.current()
        for tensor, name in zip(outputs, names, strict=True):
            # Integers that a module returns as they were, such as the sizes of packed sequences,
            # stay what they are. Others do not: dropout returns its argument in evaluation only.
            is_given = isinstance(target, str) and not renamed and id(tensor) in self.tracked
            is_given = is_given and not tensor.is_floating_point()
            if not (is_given and self.tracked[id(tensor)].name in arguments.values):
                self._track(tensor, name, number)
        operation = Operation(
            target,
            arguments,
            tuple(names),
            renamed,
            tuple(leaf for leaf in leaves if not isinstance(leaf, Tensor)),
            None if context == self.ambient else context,
            is_random,
            line=self.line,
            num_bytes=tuple(t.numel() * t.element_size() for t in outputs),
            shapes=tuple(map(shape_text, outputs)),
            call=self.last_call if isinstance(target, str) else "",
        )
        self.operations.append(operation)

    def _rename_changed(
        self, changed: list[Tensor], number: int, marks: list[set[str]]
    ) -> tuple[Renaming, ...]:
        """Give new names to all values that share memory with tensors that were changed."""
        memory = storages(changed)
        found = []
        for each in list(self.tracked.values()) if memory else []:
            if storages([each.tensor]) & memory:
                if each.made_by < 0:
                    raise InputChangedError(each.name)
                self._keep_together(each.made_by, number)
                new = f"{each.name}'{number}"
                found.append(Renaming(each.name, new))
                self.marks.rename(each.name, new, marks)
                self._track(each.tensor, new, each.made_by)
        self._check_changed_constants(changed)
        return tuple(found)

    def _check_changed_constants(self, changed: list[Tensor]) -> None:
        for tensor in changed:
            if storages([tensor]) & self.constants - self.buffers:
                raise ModelError(
                    f"{self.line}: the forward changes a tensor of shape {tuple(tensor.shape)} in "
                    "place that is neither a buffer nor made by this forward: register it with "
                    "register_buffer, or change a clone of it"
                )

    def _keep_together(self, first: int, last: int) -> None:
        """Let no cut part two operations."""
        if 0 <= first < last:
            self.inseparable.append((first, last))

    def keep_graph_together(self, tensors: list[Tensor]) -> None:
        """Let no cut part what the last operation differentiates: a graph ends with its stage."""
        made_by = (self.tracked[id(each)].made_by for each in tensors if id(each) in self.tracked)
        self._keep_together(max(min(made_by, default=0), 0), len(self.operations) - 1)

    def _check_result(self, name: str, result: Any) -> None:
        for leaf in trees.flatten(result)[0]:
            if not isinstance(leaf, Tensor):
                constant(leaf, f"{self.line}: {name} returns", self._is_constant)

    # Names

    def _track(self, tensor: Tensor, name: str, made_by: int) -> None:
        self.tracked[id(tensor)] = TrackedTensor(tensor, name, made_by)

    def template(self, tree: Any, what: str) -> Template:
        """Return a tree with references in the place of tensors."""
        leaves, spec = trees.flatten(tree)
        return Template(tuple(self._reference(leaf, what) for leaf in leaves), spec)

    def _reference(self, leaf: Any, what: str) -> Any:
        if isinstance(leaf, torch.device) and leaf == self.device:
            return DeviceRef()
        if not isinstance(leaf, Tensor):
            return constant(leaf, f"{self.line}: {what}", self._is_constant)
        if id(leaf) in self.tracked:
            return ValueRef(self.tracked[id(leaf)].name)
        if id(leaf) in self.state:
            return StateRef(self.state[id(leaf)])
        if self._is_constant(leaf):
            self.constants |= storages([leaf])
            return leaf
        if isinstance(leaf, nn.Parameter):
            raise_created(what, self.line)
        raise ModelError(
            f"{self.line}: {what} a {shape_text(leaf)} tensor that was computed where it "
            f"cannot be followed, such as in a scripted function or a nested tensor: "
            f"{OWN_MODULE}"
        )

    def _is_constant(self, tensor: Tensor) -> bool:
        """Return whether a tensor was there before, and is not one of the model's."""
        return not (id(tensor) in self.tracked or id(tensor) in self.state or tensor in self.fresh)

    def can_follow(self, call: Arguments) -> bool:
        """Return whether all tensors of a call are known."""
        return all(
            id(tensor) in self.tracked or id(tensor) in self.state or self._is_constant(tensor)
            for tensor in trees.tensors(call)
        )

    def is_of_forward(self, tensor: Tensor) -> bool:
        """Return whether a tensor is of the batch, or was made by this forward."""
        return id(tensor) in self.tracked or id(tensor) in self.taken_out

    def is_of_layers(self, tensor: Tensor) -> bool:
        """Return whether a tensor was made by layers, or of what they have made."""
        found = self.tracked.get(id(tensor))
        is_marked = found is not None and found.name in self.marks.layers
        return is_marked or id(tensor) in self.taken_out

    def has_dynamic_shape(self, call: Arguments, result: Any) -> bool:
        """Return whether a number, found in the shape of a tensor, follows from data."""
        is_number = all(isinstance(leaf, int) for leaf in trees.flatten(result)[0])
        tracked = (self.tracked.get(id(tensor)) for tensor in trees.tensors(call))
        return is_number and any(
            each is not None and each.name in self.marks.dynamic for each in tracked
        )

    def bring_in(self, tree: Any) -> Any:
        """Replace tensors that have no values by those that stand for them here.

        These are parameters on the meta device, and what hooks took out of modules.
        """
        leaves = trees.flatten(tree)[0]
        replaceable = self.taken_out.keys() | self.filled_state.keys()
        if not any(id(leaf) in replaceable for leaf in leaves):
            return tree

        def replaced(leaf: Any) -> Any:
            if id(leaf) in self.filled_state:
                return self.filled_state[id(leaf)]
            found = self.taken_out.get(id(leaf))
            if found is None or id(leaf) in self.tracked:
                return leaf
            return self._inner_tensor(found) if found.stands_for is None else found.stands_for

        return trees.map_leaves(replaced, tree)

    def _inner_tensor(self, found: TakenOut) -> Tensor:
        """Let a module's call write a tensor of one of its submodules as well."""
        tensor = zeros_like(found.tensor, self.device) if found.tensor.is_meta else found.tensor
        operation, place = self.operations[found.made_by], found.place
        assert place is not None
        name = f"{operation.call}:{place.path}.{place.attribute or place.call}[{place.leaf}]"
        self.operations[found.made_by] = replace(
            operation,
            writes=(*operation.writes, name),
            num_bytes=(*operation.num_bytes, tensor.numel() * tensor.element_size()),
            shapes=(*operation.shapes, shape_text(tensor)),
            inner=(*operation.inner, place),
        )
        self.marks.layers.add(name)
        self._track(tensor, name, found.made_by)
        self.taken_out[id(found.tensor)] = found._replace(stands_for=tensor)
        return tensor

    def tape(self, output: Any) -> Tape:
        """Return the tape of a forward that is over."""
        self.line = "the output"
        return Tape(
            tuple(self.operations),
            self.template(output, "the model returns"),
            tuple(self.inputs),
            frozenset(name for name, tensor in self.inputs.items() if tensor.requires_grad),
            tuple(self.inseparable),
        )
