"""A model as it was recorded: its layers, and a tape for each kind of batch.

batch ─► signature ─► tapes recorded for it ─► the one whose guards hold, or a new one
                                               │
                 what depends on the batch alone is computed, layers get the rest
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from stageline.errors import ModelError
from stageline.model import trees
from stageline.model.layers import Layer, LayerSequence, ValueSize
from stageline.model.recording.call_arguments import call_arguments
from stageline.model.recording.choose_opaque import bypassed, choose_opaque, openable
from stageline.model.recording.interception.constants import NotOpaqueError
from stageline.model.recording.interception.read_attributes import plain_attributes
from stageline.model.recording.loss_count import LossCount, find_loss_count, without_targets
from stageline.model.recording.recorded_layer import (
    TAPE,
    RecordedLayer,
    Replay,
)
from stageline.model.recording.recorder import record
from stageline.model.recording.replay import GuardError, Values, run_groups
from stageline.model.recording.segments import CutTape, Segment, cut_tape
from stageline.model.recording.tape import Arguments, Context
from stageline.torch_private import buffer_table, parameter_table

BATCH = "batch"  # the name of what all layers read of a micro-batch
OUTPUT = "output"


class RecordedModel:
    """A model with the tapes of its forward. State: the tapes, which other batches may add to."""

    def __init__(
        self,
        model: nn.Module,
        inputs: Any,
        named: Mapping[str, Any],
        opaque: Collection[str] = (),
        opened: Collection[str] = (),
    ) -> None:
        """Record the forward on these inputs: one micro-batch."""
        self.model = model
        self.opaque = choose_opaque(model, opaque, opened)
        self.transparent = _transparent(model, self.opaque)
        own = {name: any(True for _ in m.parameters()) for name, m in self.opaque.items()}
        self.with_parameters = {name for name, has_own in own.items() if has_own}
        self.tapes: list[CutTape] = []
        self.counts: list[LossCount | None] = []  # by tape
        self.empty_tapes: dict[int, int] = {}  # by tape, its like for a batch that counts nothing
        self.by_signature: dict[Any, list[int]] = {}
        arguments = call_arguments(model, inputs, named)
        self._record(arguments, self._signature(arguments))
        self.layers = LayerSequence(tuple(_layers(self)), (model,), _first_names(model), self)

    def update_model(self) -> None:
        """Give the model the tensors that took the place of its own, such as those of meta.

        Opaque modules are the model's own, and have them already.
        """
        for layer in self.layers:
            assert isinstance(layer.module, RecordedLayer)
            for name, tensor in layer.module.glue_tensors().items():
                parent, _, own = name.rpartition(".")
                owner = self.model.get_submodule(parent)
                is_parameter = isinstance(tensor, nn.Parameter)
                table = parameter_table(owner) if is_parameter else buffer_table(owner)
                table[own] = tensor  # type: ignore[assignment]

    def prepare(self, inputs: Any, named: Mapping[str, Any]) -> dict[str, Any]:
        """Return what layers read of a micro-batch: what they use of it, and the tape's number."""
        arguments = call_arguments(self.model, inputs, named)
        signature = self._signature(arguments)
        for number in self.by_signature.get(signature, []):
            try:
                return {BATCH: self._values(number, arguments)}
            except GuardError:
                continue
        return {BATCH: self._values(self._record(arguments, signature), arguments)}

    def _values(self, number: int, arguments: Arguments) -> Values:
        """Compute what depends on the batch alone; raise GuardError if it is not for this tape."""
        cut = self.tapes[number]
        values: Values = dict(_named_tensors(arguments))
        run_groups(cut.prepared_before, values, _no_state, {})
        count = self.counts[number]
        if count is not None and not count.is_sum and not count.of(values):
            number = self._empty_tape(number, count)
        return {TAPE: number} | {name: values[name] for name in sorted(cut.inputs)}

    def _empty_tape(self, number: int, count: LossCount) -> int:
        if number not in self.empty_tapes:
            cut = without_targets(self.tapes[number], count, self.opaque)
            self.empty_tapes[number] = self._add_tape(cut, count)
        return self.empty_tapes[number]

    def _add_tape(self, cut: CutTape, count: LossCount | None) -> int:
        self.tapes.append(cut)
        self.counts.append(count)
        return len(self.tapes) - 1

    def loss_counts(self, parts: Sequence[Mapping[str, Any]]) -> list[float] | None:
        """Return how many targets the model's own loss counts in each micro-batch.

        None: it is a mean over samples.
        """
        values = [part[BATCH] for part in parts]
        counts = [self.counts[each[TAPE]] for each in values]
        if any(count is None for count in counts):
            return None
        pairs = zip(counts, values, strict=True)
        return [c.of(v) for c, v in pairs if c is not None]

    def value_sizes(self) -> dict[str, ValueSize]:
        """Return the sizes of all values in the micro-batch that was recorded first."""
        return {
            name: ValueSize(shape, size)
            for each in self.tapes[0].tape.operations
            for name, shape, size in zip(each.writes, each.shapes, each.num_bytes, strict=True)
        }

    @property
    def has_own_loss(self) -> bool:
        """Return whether the output has a tensor that is called its loss."""
        output = self.tapes[0].tape.output
        named = zip(trees.paths(output.spec), output.leaves, strict=True)
        return any(path in (".loss", "['loss']") and leaf is not None for path, leaf in named)

    def is_sum(self, part: Mapping[str, Any]) -> bool:
        """Return whether the model's own loss is a sum, which no weight has to divide."""
        count = self.counts[part[BATCH][TAPE]]
        return count is not None and count.is_sum

    def _record(self, arguments: Arguments, signature: Any) -> int:
        tape = record(self.model, self.opaque, arguments, _named_tensors(arguments))
        first = self.tapes[0] if self.tapes else None
        cut = cut_tape(tape, self.with_parameters, first)
        if first is not None:
            cut = _aligned(cut, first)
        number = self._add_tape(cut, find_loss_count(cut, self.opaque))
        self.by_signature.setdefault(signature, []).append(number)
        return number

    def _signature(self, arguments: Arguments) -> Any:
        """Return what another tape is recorded for: shapes, constants, and modes."""
        leaves, spec = trees.flatten(arguments)
        described = tuple(
            (tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
            if isinstance(leaf, Tensor)
            else (type(leaf), leaf)
            for leaf in leaves
        )
        modes = plain_attributes(self.transparent.values())
        return described, spec, modes, Context.current().autocast


def record_model(
    model: nn.Module,
    inputs: Any,
    named: Mapping[str, Any],
    opaque: Collection[str] = (),
    min_layers: int = 1,
) -> RecordedModel:
    """Record a model; open its largest modules until it has enough layers, if that can be had."""
    opened: set[str] = set()
    recorded = _opened_as_needed(model, inputs, named, opaque, opened)
    while unused := bypassed(recorded.opaque, recorded.tapes[0].tape) - set(opaque):
        opened |= unused
        recorded = RecordedModel(model, inputs, named, opaque, opened)
    recorded = _with_loss_in_view(recorded, opaque, opened, (inputs, named))
    while (missing := min_layers - len(recorded.layers)) > 0:
        called = [n for n in recorded.with_parameters if openable(n, recorded.opaque[n], opaque)]
        if not called:
            break
        sizes = {n: sum(p.numel() for p in recorded.opaque[n].parameters()) for n in called}
        opened.update(sorted(called, key=lambda name: (-sizes[name], name))[:missing])
        try:
            recorded = RecordedModel(model, inputs, named, opaque, opened)
        except ModelError:
            break  # what is inside cannot be recorded
    return recorded


def _opened_as_needed(
    model: nn.Module,
    inputs: Any,
    named: Mapping[str, Any],
    opaque: Collection[str],
    opened: set[str],
) -> RecordedModel:
    """Record a model; open modules that are called with what cannot be followed into them."""
    while True:
        try:
            return RecordedModel(model, inputs, named, opaque, opened)
        except NotOpaqueError as error:
            if error.name in opaque or error.name in opened:
                raise
            opened.add(error.name)


def _with_loss_in_view(
    recorded: RecordedModel, opaque: Collection[str], opened: set[str], batch: tuple[Any, Any]
) -> RecordedModel:
    """Open the module that has the only cross-entropy in it, to see which targets it counts."""
    hidden = recorded.tapes[0].tape.hidden_losses
    if recorded.counts[0] is not None or len(hidden) != 1 or hidden[0] in opaque:
        return recorded
    try:
        found = RecordedModel(recorded.model, *batch, opaque, opened | set(hidden))
    except ModelError:
        return recorded  # what is inside cannot be recorded
    opened |= set(hidden)
    return found


def _no_state(name: str) -> Any:
    raise AssertionError(f"{name} is used before any layer runs")


def _transparent(model: nn.Module, opaque: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    inside = {part for module in opaque.values() for part in module.modules()}
    return {n: m for n, m in model.named_modules() if m not in inside}


def _named_tensors(arguments: Arguments) -> dict[str, Tensor]:
    """Return the tensors of a call by their names."""
    leaves, spec = trees.flatten({"args": arguments[0], **arguments[1]})
    named = zip(trees.paths(spec), leaves, strict=True)
    return {_tensor_name(path): leaf for path, leaf in named if isinstance(leaf, Tensor)}


def _tensor_name(path: str) -> str:
    """Return a name from a path: `input_ids`, or `args[0]`."""
    key, _, rest = path.removeprefix("['").partition("']")
    return key + rest


def _aligned(cut: CutTape, first: CutTape) -> CutTape:
    """Return the tape with the segments of the first one; raise if more values would pass."""
    names = [segment.name for segment in cut.segments]
    wanted = [segment.name for segment in first.segments]
    if names != wanted:
        missing = next((n for n in [*wanted, *names] if (n in names) != (n in wanted)), names[0])
        raise ModelError(
            f"for this batch the model runs other layers than for the one that was recorded first: "
            f"{missing!r} is called in one of them only, so the stages would differ; name the "
            "module around it in opaque="
        )
    for segment, other in zip(cut.segments, first.segments, strict=True):
        if used := sorted(segment.used - other.used):
            raise ModelError(
                f"for this batch layer {segment.name!r} uses {used[0]!r}, but not for the one that "
                "was recorded first, by which layers have their weights: put what differs into a "
                "module of its own and name it in opaque="
            )
        if extra := [name for name in segment.reads if name not in other.reads]:
            raise ModelError(
                f"for this batch {extra[0]!r} passes into layer {segment.name!r}, but not for the "
                "one that was recorded first, by which the stages were connected: give "
                "example_inputs of the kind that has it"
            )
    return cut


def _layers(recorded: RecordedModel) -> Iterator[Layer]:
    cut = recorded.tapes[0]
    last = len(cut.segments) - 1
    called: dict[nn.Module, int] = {}  # parts with weights, and the first layer that has them
    made: list[RecordedLayer] = []
    training = partial(getattr, recorded.model, "training")
    for number, segment in enumerate(cut.segments):
        writes = segment.writes if number < last else (OUTPUT,)
        layer = RecordedLayer(Replay(number, recorded.tapes, segment.reads, writes, training))
        _place(layer, segment, recorded, called)
        made.append(layer)
    _place_unused(made, recorded)
    for number, (layer, segment) in enumerate(zip(made, cut.segments, strict=True)):
        writes = segment.writes if number < last else (OUTPUT,)
        yield Layer(segment.name, layer, (BATCH, *segment.reads), writes, has_full_names=True)


def _place(
    layer: RecordedLayer, segment: Segment, recorded: RecordedModel, called: dict[nn.Module, int]
) -> None:
    """Put the modules and tensors that a segment uses below its layer."""
    placed: set[nn.Module] = set()
    paths = _paths(recorded.model)
    for operation in segment.operations:
        if operation.module is not None:
            module = recorded.opaque[operation.module]
            if module in placed:
                continue
            placed.add(module)
            owners = {called.setdefault(part, id(layer)) for part in _with_state(module)}
            place = layer.place_module if owners <= {id(layer)} else layer.place_copy
            place(paths[module], module)
        for name in operation.arguments.state:
            _place_tensor(layer, name, recorded.model)


def _with_state(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the parts of a module that have parameters or buffers of their own."""
    for part in module.modules():
        if parameter_table(part) or buffer_table(part):
            yield part


def _place_tensor(layer: RecordedLayer, name: str, model: nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    owner = model.get_submodule(parent)
    is_persistent = own in owner.state_dict(keep_vars=True)
    layer.place_tensor(name, getattr(owner, own), persistent=is_persistent)


def _first_names(model: nn.Module) -> dict[str, str]:
    """Return the first names of parameters that have several, by their other names."""
    first: dict[Tensor, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    pairs = [(name, first.setdefault(parameter, name)) for name, parameter in named]
    return {name: first_name for name, first_name in pairs if name != first_name}


def _paths(model: nn.Module) -> dict[nn.Module, list[str]]:
    found: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        found.setdefault(module, []).append(name)
    return found


def _place_unused(layers: list[RecordedLayer], recorded: RecordedModel) -> None:
    """Put parameters and buffers that the forward does not use below the last layer."""
    names = {name for layer in layers for name in layer.state_dict()}
    names |= {name for layer in layers for name, _ in layer.named_buffers()}
    for name, module in recorded.model.named_modules(remove_duplicate=False):
        for own in (*parameter_table(module), *buffer_table(module)):
            full = f"{name}.{own}" if name else own
            if full not in names and getattr(module, own) is not None:
                _place_tensor(layers[-1], full, recorded.model)
