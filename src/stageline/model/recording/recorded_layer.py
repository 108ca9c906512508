"""A layer that replays its part of a tape."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

from torch import Tensor, nn

from stageline.model.recording.replay import OperationGroup, Values, prepared, run_groups
from stageline.model.recording.segments import CutTape
from stageline.model.recording.tape import DEVICE, device_of
from stageline.torch_private import buffer_table, child_table, parameter_table, shallow_copy

TAPE = "tape"  # the name of its number among the values of a batch


class Replay:
    """What a layer needs to run its segments, apart from the values.

    An object of its own, so that nobody takes it for state that the layer's forward may change.
    State: the tapes, which other batches may add to.
    """

    def __init__(
        self,
        number: int,
        tapes: Sequence[CutTape],
        reads: Sequence[str],
        writes: Sequence[str],
        is_training: Callable[[], bool],
    ) -> None:
        self.number, self.tapes = number, tapes
        self.reads, self.writes = tuple(reads), tuple(writes)
        self.is_training = is_training
        self.prepared: dict[int, tuple[OperationGroup, ...]] = {}  # by tape
        self.modules: dict[str, nn.Module] = {}
        self.owners: dict[str, tuple[nn.Module, str]] = {}  # of parameters and buffers in glue
        self.copies: list[tuple[nn.Module, nn.Module]] = []  # of modules that other layers call

    def with_modules(self, made: Mapping[nn.Module, nn.Module]) -> Replay:
        """Return the same for copies of the modules."""
        replay = Replay(self.number, self.tapes, self.reads, self.writes, self.is_training)
        replay.modules = {name: made[module] for name, module in self.modules.items()}
        replay.copies = [
            (made[copied], made.get(module, module))
            for copied, module in self.copies
            if copied in made
        ]
        replay.owners = {name: (made[module], own) for name, (module, own) in self.owners.items()}
        return replay

    def state(self, name: str) -> Any:
        """Return a parameter or buffer that is used outside of opaque modules."""
        owner, own = self.owners[name]
        return getattr(owner, own)

    def run(self, batch: Mapping[str, Any], given: Sequence[Any]) -> Any:
        """Run the segment of the batch's tape; return the values that later layers read."""
        for copied, module in self.copies:
            copied.training = module.training
        cut = self.tapes[batch[TAPE]]
        is_last = self.number == len(cut.segments) - 1
        groups = self.prepared.get(batch[TAPE])
        if groups is None:
            kept = cut.tape.output.values if is_last else self.writes
            groups = prepared(cut.segments[self.number].operations, frozenset(kept))
            self.prepared[batch[TAPE]] = groups
        values: Values = dict(batch)
        values.update(zip(self.reads, given, strict=True))
        values[DEVICE] = device_of(values)
        del batch, given
        run_groups(groups, values, self.state, self.modules)
        if is_last:
            return cut.tape.output.fill(values, self.state)
        made = [values.get(name) for name in self.writes]
        return made[0] if len(made) == 1 else tuple(made)


class RecordedLayer(nn.Module):
    """A layer that runs its segment of a tape.

    The modules and tensors that it needs are below it under the names that they have in the model.
    """

    def __init__(self, replay: Replay) -> None:
        super().__init__()
        self._replay = replay

    @property
    def training(self) -> bool:
        """Return whether the model is in training, whoever has switched it."""
        return self._replay.is_training()

    @training.setter
    def training(self, mode: bool) -> None:
        """Do nothing: the mode is the model's."""

    def forward(self, batch: Mapping[str, Any], *given: Any) -> Any:
        return self._replay.run(batch, given)

    def place_module(self, names: Iterable[str], module: nn.Module) -> None:
        """Put a module below this layer, under its names in the model."""
        for name in names:
            parent, own = self._scope(name)
            child_table(parent)[own] = module
            self._replay.modules[name] = module

    def place_copy(self, names: Iterable[str], module: nn.Module) -> None:
        """Put a copy below it, of a module that another layer has: with the same weights."""
        copied = shared_copy(module)
        self._replay.copies += zip(copied.modules(), module.modules(), strict=True)
        self.place_module(names, copied)

    def place_tensor(self, name: str, tensor: Tensor, *, persistent: bool) -> None:
        """Put a parameter or buffer below this layer, under its name in the model."""
        parent, own = self._scope(name)
        if isinstance(tensor, nn.Parameter):
            parent.register_parameter(own, tensor)
        elif own not in buffer_table(parent):
            parent.register_buffer(own, tensor, persistent=persistent)
        self._replay.owners[name] = parent, own

    def glue_tensors(self) -> dict[str, Tensor]:
        """Return the parameters and buffers that are used outside of opaque modules, by name."""
        return {name: self._replay.state(name) for name in self._replay.owners}

    def _scope(self, name: str) -> tuple[nn.Module, str]:
        """Return the module that has the last part of a name, and that part."""
        *path, own = name.split(".")
        scope: nn.Module = self
        for part in path:
            children = child_table(scope)
            if part not in children:
                children[part] = nn.Module()
            child = children[part]
            assert child is not None
            scope = child
        return scope, own

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a copy whose modules are copies, for the same tapes."""
        copied: dict[nn.Module, nn.Module] = {}
        for child in self.children():
            made = copy.deepcopy(child, memo)
            copied |= zip(child.modules(), made.modules(), strict=True)
        layer = type(self)(self._replay)
        copied[self] = layer
        child_table(layer).update({n: copied[m] for n, m in child_table(self).items() if m})
        for name, parameter in parameter_table(self).items():
            layer.register_parameter(name, copy.deepcopy(parameter, memo))
        for name, buffer in buffer_table(self).items():
            layer.register_buffer(name, copy.deepcopy(buffer, memo))
        layer._replay = self._replay.with_modules(copied)  # noqa: SLF001  its own class
        return layer


def shared_copy(module: nn.Module, made: dict[nn.Module, nn.Module] | None = None) -> nn.Module:
    """Return a copy of a module with copies of its submodules, and the same parameters."""
    made = {} if made is None else made
    if module not in made:
        made[module] = shallow_copy(module)
        for name, child in child_table(module).items():
            child_table(made[module])[name] = child and shared_copy(child, made)
    return made[module]
