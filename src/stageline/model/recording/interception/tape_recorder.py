"""Intercept what a forward does: calls of opaque modules, and torch's functions between them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import get_ident
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import CheckpointFunction

from stageline.errors import ModelError
from stageline.model import trees
from stageline.model.function_interceptor import FunctionInterceptor
from stageline.model.recording.interception.constants import (
    OWN_MODULE,
    NotOpaqueError,
    is_array,
    refuse_call,
    storages,
)
from stageline.model.recording.interception.functions import (
    function_name,
    is_in_place,
    is_packing,
    is_shown,
    may_hold_tensors,
    packed_batch_sizes,
    register_gradient_hook,
    works_on_meta,
)
from stageline.model.recording.interception.operator_recorder import OperatorRecorder
from stageline.model.recording.interception.operator_watch import OperatorWatch
from stageline.model.recording.preserved import (
    CREATED,
    AttributeLog,
    Change,
    preserved_foreign_random,
    raise_changed,
    raise_created,
)
from stageline.model.recording.stand_in import stand_in
from stageline.model.recording.tape import Arguments, Tape, Template
from stageline.model.recording.tape_writer import TapeWriter
from stageline.torch_private import is_inside_transform, version_of

LOSSES: tuple[Callable[..., Any], ...] = (functional.cross_entropy, functional.nll_loss)
OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]), "<")


class NeedsValuesError(Exception):
    """The forward branches on what its layers compute, so they have to run for real."""


class ModuleNeedsValuesError(Exception):
    """A module cannot run without data, so those of its class have to run for real."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__(kind)
        self.kind = kind


@dataclass
class HowToRecord:
    """What the attempts so far have shown to be necessary."""

    need_values: set[type[nn.Module]] = field(default_factory=set)  # classes that have to run
    real: bool = False  # whether all modules have to
    copied: set[str] = field(default_factory=set)  # tensors of the batch that are changed in place
    seed: int = 0  # of random numbers, if the model goes on by some


class TapeRecorder(FunctionInterceptor):
    """Intercepts what happens outside of opaque modules. State: the tape that is written."""

    def __init__(
        self,
        model: nn.Module,
        opaque: Mapping[str, nn.Module],
        inputs: Mapping[str, Tensor],
        how: HowToRecord,
        log: AttributeLog,
    ) -> None:
        super().__init__()
        self.opaque, self.how, self.log = opaque, how, log
        self.thread = get_ident()
        self.is_inside = False  # an opaque module, or our own code
        self.module = ""  # the opaque module that runs
        self.hidden_losses: list[str] = []  # modules with a cross-entropy in them
        self.dtype = torch.get_default_dtype()
        with torch.inference_mode(mode=False), torch.enable_grad():
            self.given = {id(tensor): (name, _own_copy(tensor)) for name, tensor in inputs.items()}
            self.writer = TapeWriter(model, dict(self.given.values()))
        self.operators = OperatorRecorder(self.writer, lambda: self.is_inside, self.inside)

    def own_inputs(self, arguments: Arguments) -> Arguments:
        """Return the call's arguments with copies of its tensors, which it may change."""

        def copied(leaf: Any) -> Any:
            if id(leaf) not in self.given:
                return leaf
            name, tensor = self.given[id(leaf)]
            return tensor.clone() if name in self.how.copied else tensor

        found: Arguments = trees.map_leaves(copied, arguments)
        return found

    def may_keep(self, changes: list[Change], kept: Collection[str]) -> bool:
        """Return whether attributes may stay as they were set; raise if they are set each time."""
        for change in changes:
            name = self.log.full_name(change)
            if change.key in CREATED:
                raise_created(f"{name} is", "the forward")
            if name in kept:
                raise_changed(name)
        tensors = [t for change in changes for t in trees.tensors(change.value)]
        return self.how.real or not any(map(self.writer.is_of_layers, tensors))

    @contextmanager
    def replaced_modules(self) -> Iterator[None]:
        """Let opaque modules, and functions with a backward of their own, report their calls."""
        names: dict[nn.Module, str] = {}
        for name, module in self.opaque.items():
            names.setdefault(module, name)  # the first, if it has several
        classes = {module: type(module) for module in names}
        apply = vars(torch.autograd.Function)["apply"]

        def recorded_apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            own = apply.__get__(None, cls)
            if self.is_inside or get_ident() != self.thread:
                return own(*args, **kwargs)
            if cls is CheckpointFunction:  # its graph is for one device; `recompute=` is ours
                return args[0](*args[2:])
            return self.call(own, args, kwargs)

        def recorded_from_numpy(array: Any) -> Any:
            is_recorded = not self.is_inside and get_ident() == self.thread
            return self.call(from_numpy, (array,), {}) if is_recorded else from_numpy(array)

        from_numpy = torch.from_numpy
        try:
            for module, name in names.items():
                module.__class__ = self._reporting_class(name, classes[module])
            torch.autograd.Function.apply = classmethod(recorded_apply)  # type: ignore[assignment,method-assign]
            torch.from_numpy = recorded_from_numpy  # type: ignore[assignment]  # its argument's name
            yield
        finally:
            torch.autograd.Function.apply = apply  # type: ignore[method-assign]  # as it was
            torch.from_numpy = from_numpy
            for module, kind in classes.items():
                module.__class__ = kind

    def _reporting_class(self, name: str, kind: type[nn.Module]) -> type[nn.Module]:
        recorder = self

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if recorder.is_inside or get_ident() != recorder.thread:
                return kind.__call__(module, *args, **kwargs)
            return recorder.call_module(name, module, kind, (args, kwargs))

        return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})

    def call_module(
        self, name: str, module: nn.Module, kind: type[nn.Module], call: Arguments
    ) -> Any:
        """Record a call of an opaque module, and return what stands for its result."""
        self.writer.line = _line()
        self._check_attributes(name, module)
        is_real = self.how.real or kind in self.how.need_values
        reporting, module.__class__ = type(module), kind
        self.module = name if not kind.__module__.startswith("torch.nn.") else ""
        try:
            with self.inside(), preserved_foreign_random():
                call = self.writer.bring_in(call)
                arguments = self._module_arguments(name, call)
                found = stand_in(module, *call, real=is_real)
                self._module_arguments(name, call)  # a module may fill an object, such as a cache
        except ModelError:
            raise
        except Exception as error:
            if is_real:
                raise
            raise ModuleNeedsValuesError(kind) from error
        finally:
            module.__class__, self.module = reporting, ""
        with self.inside():
            self.log.accept(module.modules())
            try:
                self.writer.write_module(name, module, arguments, found)
            except ModelError as error:  # it returns an object with tensors in it, say
                raise NotOpaqueError(name, str(error)) from None
        return found.result

    def _module_arguments(self, name: str, call: Arguments) -> Template:
        try:
            return self.writer.template(call, f"{name} is called with")
        except ModelError as error:
            raise NotOpaqueError(name, str(error)) from None

    def _check_attributes(self, name: str, module: nn.Module) -> None:
        """Raise if a tensor comes into a module by an attribute."""
        for change in self.log.note(module.modules()):
            if any(map(self.writer.is_of_forward, trees.tensors(change.value))):
                raise NotOpaqueError(
                    name,
                    f"{self.writer.line}: {self.log.full_name(change)!r} is set to a tensor before "
                    f"{name!r} is called, which would happen in the recording only: give it as an "
                    "argument",
                )

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function of torch, and record it if it makes, changes or looks into tensors."""
        if self.is_inside:
            if self.module and func in LOSSES:
                self.hidden_losses.append(self.module)
            return func(*args, **kwargs)
        if is_inside_transform():
            return self.operators.call(func, args, kwargs)
        if func is Tensor.__iter__:
            return iter(self.call(Tensor.unbind, args, {}))
        writer = self.writer
        writer.line = _line()
        args = self._without_tensor_slices(args)
        with self.inside():
            call: Arguments = writer.bring_in((args, kwargs))
            refuse_call(func, call, writer.weights, writer.line)
            given = trees.tensors(call)
            versions = [version_of(tensor) for tensor in given]
            generator = torch.get_rng_state()
            with OperatorWatch() as watch:
                result = func(*call[0], **call[1])
            if writer.device.type == "cpu" and torch.equal(generator, torch.get_rng_state()):
                watch.is_random = False  # an operator that could have drawn
            after = zip(given, versions, strict=True)
            changed = [tensor for tensor, version in after if version_of(tensor) != version]
            if is_in_place(func):
                changed += [tensor for tensor in given[:1] if tensor.is_inference()]
            if changed or (may_hold_tensors(result) and trees.tensors(result)):
                self._check_dtype()
                writer.write_function(func, call, result, changed, watch)
                self._record_more(func, call, result, watch)
            elif given:
                self._record_other(func, call, result)
        return result

    def _record_more(
        self, func: Callable[..., Any], call: Arguments, result: Any, watch: OperatorWatch
    ) -> None:
        """Record what has to be known of some functions beside their call."""
        if is_packing(func):
            lengths: Arguments = ((call[0][1],), {})
            self.writer.write_function(packed_batch_sizes, lengths, result[1], [], watch)
        elif func is torch.autograd.grad:
            self.writer.keep_graph_together(trees.tensors(call))
        if is_array(call[0]):  # whose memory the result may be in
            self.writer.constants |= storages(trees.tensors(result))

    def _record_other(self, func: Callable[..., Any], call: Arguments, result: Any) -> None:
        """Record a function that neither makes nor changes tensors."""
        if func is Tensor.register_hook:
            self.writer.write_effect(register_gradient_hook, call)
        elif result is not None:
            self._record_guard(func, call, result)
        elif function_name(func) != "get":  # of an attribute, which is None
            self.writer.write_effect(func, call)

    def _check_dtype(self) -> None:
        if torch.get_default_dtype() != self.dtype:
            raise ModelError(
                f"{self.writer.line}: the forward sets the default dtype to "
                f"{torch.get_default_dtype()}, which all threads would see: give dtype= to the "
                "functions that make tensors"
            )

    def _record_guard(self, func: Callable[..., Any], call: Arguments, result: Any) -> None:
        """Record what the model found in a tensor's values, or in a shape that data decide on."""
        writer = self.writer
        is_shape = not is_shown(func, call) and works_on_meta(func, call)
        if is_shape and not writer.has_dynamic_shape(call, result):
            return
        if type(result).__module__.startswith("numpy"):
            raise ModelError(
                f"{writer.line}: a tensor becomes an array of numpy, where it cannot be followed: "
                f"use torch's functions, or {OWN_MODULE}"
            )
        arguments = writer.template(call, f"{function_name(func)} is called with")
        may_differ = not (self.how.real or (is_shape and writer.has_meta_weights))
        if may_differ and not writer.marks.layers.isdisjoint(arguments.values):
            raise NeedsValuesError
        writer.write_guard(func, arguments, result)

    def _without_tensor_slices(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return arguments with numbers in slices, which may have been given as tensors."""

        def number(bound: Any) -> Any:
            return self.call(Tensor.__index__, (bound,), {}) if isinstance(bound, Tensor) else bound

        def replaced(leaf: Any) -> Any:
            if isinstance(leaf, slice):
                return slice(number(leaf.start), number(leaf.stop), number(leaf.step))
            return leaf

        has_slices = any(isinstance(leaf, slice) for leaf in trees.flatten(args)[0])
        return trees.map_leaves(replaced, args) if has_slices else args

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Record nothing of what happens within."""
        before, self.is_inside = self.is_inside, True
        try:
            yield
        finally:
            self.is_inside = before

    def tape(self, output: Any) -> Tape:
        """Return the tape of a forward that is over."""
        tape = self.writer.tape(self.writer.bring_in(output))
        return replace(tape, hidden_losses=tuple(self.hidden_losses))


def _own_copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _line() -> str:
    """Return the file and line of the model's code that is running."""
    frame: FrameType | None = sys._getframe()  # noqa: SLF001  the stack without its source lines
    while frame is not None and frame.f_code.co_filename.startswith(OURS):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "the model"
