"""The layers of any model: those of a sequence, or of a module whose forward is recorded."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import nn

from stageline.model.layers import Layer, LayerSequence, is_plain_sequential
from stageline.model.recording.recorded_model import record_model

AnyModel = LayerSequence | nn.Module | Iterable[Layer | nn.Module]


def is_recorded(model: AnyModel) -> bool:
    """Return whether a model's forward has to be recorded, to know its layers."""
    return isinstance(model, nn.Module) and not is_plain_sequential(model)


def layers_of(
    model: AnyModel,
    inputs: Any,
    named: Mapping[str, Any],
    opaque: Collection[str] = (),
    min_layers: int = 1,
) -> LayerSequence:
    """Return a model's layers; one that is no sequence of them is recorded on these inputs."""
    if not isinstance(model, nn.Module) or is_plain_sequential(model):
        return LayerSequence.of(model)
    return LayerSequence.of(record_model(model, inputs, named, opaque, min_layers).layers)
