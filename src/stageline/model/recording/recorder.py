"""Run a forward once and record its operations, in as many attempts as that takes."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from stageline.errors import ModelError
from stageline.model import trees
from stageline.model.device_settings import seed_generators
from stageline.model.recording.interception.constants import OWN_MODULE
from stageline.model.recording.interception.tape_recorder import (
    HowToRecord,
    ModuleNeedsValuesError,
    NeedsValuesError,
    TapeRecorder,
)
from stageline.model.recording.preserved import (
    AttributeLog,
    Change,
    preserved_values,
    raise_changed,
)
from stageline.model.recording.scratch_attributes import are_scratch, leave_not_kept
from stageline.model.recording.tape import Arguments, Operation, Tape
from stageline.model.recording.tape_writer import InputChangedError
from stageline.torch_private import has_backward_hooks

SEEDS = 3  # further recordings of a model that goes on by random numbers


def record(
    model: nn.Module,
    opaque: Mapping[str, nn.Module],
    arguments: Arguments,
    inputs: Mapping[str, Tensor],
) -> Tape:
    """Return the tape of a call of the model; `inputs` are the tensors of the call by name.

    Nothing that belongs to the model is changed: its buffers and torch's random state are restored.
    What it sets once and for all, such as a table of positions, stays.
    """
    _check_backward_hooks(model, opaque)
    log, how = AttributeLog(model), HowToRecord()
    kept: set[str] = set()
    first: Tape | None = None
    last: tuple[Tape, list[Change]] | None = None  # an attempt that has set attributes
    try:
        while True:
            recorder = TapeRecorder(model, opaque, inputs, how, log)
            tape = _attempt(recorder, model, arguments, how)
            changes = [] if tape is None else log.changes()
            if tape is not None and not changes:
                _check_kept(last[1] if last else [], log)
                log.restore()
                first = first or tape
                _check_chance(first, tape)
                if how.seed == SEEDS or not _chances(tape):
                    return first
                how.seed += 1
                continue
            if tape and last and not _chances(tape) and are_scratch(last, (tape, changes)):
                names = [log.full_name(change) for change in changes]
                log.restore_original()
                leave_not_kept(changes, names)
                return tape
            if recorder.may_keep(changes, kept):
                kept |= {log.full_name(change) for change in changes}
                last = None if tape is None else (tape, changes)
                log.restore(keep=changes)
            else:  # its layers have made it, of zeros
                how.real = True
                log.restore()
    except BaseException:
        log.restore_original()
        raise


def _attempt(
    recorder: TapeRecorder, model: nn.Module, arguments: Arguments, how: HowToRecord
) -> Tape | None:
    """Return the tape; None if it takes another attempt."""
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(mode=False))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(preserved_values(model))
            stack.enter_context(not_compiled())
            stack.enter_context(recorder.replaced_modules())
            stack.enter_context(recorder.writer.fresh)
            stack.enter_context(recorder.operators)
            stack.enter_context(recorder)
            if how.seed:
                seed_generators(how.seed)
            args, kwargs = recorder.own_inputs(arguments)
            output = model(*args, **kwargs)
            with recorder.inside():
                return recorder.tape(output)
    except ModuleNeedsValuesError as error:
        how.need_values.add(error.kind)
    except InputChangedError as error:
        how.copied.add(error.name)
    except NeedsValuesError:
        if any(p.is_meta for p in model.parameters()):
            raise ModelError(
                f"{recorder.writer.line}: the model branches on what its layers compute, but "
                "its weights are on the meta device: load them first, or name the module that "
                "branches in opaque="
            ) from None
        how.real = True
    except ModelError:
        raise
    except Exception:  # it may not have liked zeros
        if how.real or any(p.is_meta for p in model.parameters()):
            raise
        how.real = True
    return None


def _check_kept(changes: list[Change], log: AttributeLog) -> None:
    """Raise if an attribute that the forward has set once would keep the graph of the recording."""
    for change in changes:
        if any(tensor.requires_grad for tensor in trees.tensors(change.value)):
            raise_changed(log.full_name(change))


def _chances(tape: Tape) -> list[Operation]:
    """Return the guards of random numbers."""
    return [each for each in tape.operations if each.by_chance]


def _check_chance(first: Tape, other: Tape) -> None:
    """Raise if a model goes another way with other random numbers."""
    for guard, again in zip(_chances(first), _chances(other), strict=False):
        if (guard.line, guard.constants) != (again.line, again.constants):
            raise ModelError(
                f"{guard.line}: the model goes on by a random number, so that its layers would be "
                "others each time: switch this off (layerdrop=0.0, say), multiply by a random "
                f"tensor instead, or {OWN_MODULE}"
            )


def _check_backward_hooks(model: nn.Module, opaque: Mapping[str, nn.Module]) -> None:
    inside = {part for module in opaque.values() for part in module.modules()}
    for name, module in model.named_modules():
        if module not in inside and has_backward_hooks(module):
            raise ModelError(
                f"{name or type(model).__name__!r} has a backward hook, but its layers may be on "
                "several ranks, so there is no backward of the module: put hooks on its layers"
                + (", or name it in opaque=" if name else "")
            )


@contextmanager
def not_compiled() -> Iterator[None]:
    """Run compiled modules and functions as they are written: nothing has to be fast."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
