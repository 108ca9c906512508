"""What torch's own `torch.distributed.pipelining.pipeline()` makes of the same models.

As its documentation advises the model is in evaluation, and there is one split point in the middle.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from benchmarks.models.catalogue import make_case
from benchmarks.models.combination import STEPS
from benchmarks.models.worker_group import short_reason
from torch import nn
from torch.distributed.pipelining import SplitPoint, pipeline

from stageline.model import trees
from stageline.model.recording.call_arguments import call_arguments
from stageline.model.recording.recorded_model import record_model

MICROBATCH, OTHER = 3, 4  # samples


@dataclass(frozen=True)
class Traced:
    """What was reached, each with the reason if it was not, and how many names survive."""

    not_traced: str = ""
    not_run: str = ""  # on the micro-batch that it was traced with
    not_at_other_size: str = ""
    num_kept: int = 0
    num_names: int = 0


def trace_with_torch(name: str) -> Traced:
    case = make_case(name)
    model = case.model.eval()
    plain = deepcopy(model)
    num_names = sum(1 for _ in plain.named_parameters())
    inputs, other = (case.batch(samples, STEPS[0][1])[0] for samples in (MICROBATCH, OTHER))
    args, kwargs = call_arguments(plain, inputs, {})
    try:
        split = {_middle(plain, inputs): SplitPoint.BEGINNING}
        pipe = pipeline(model, args, kwargs, split_spec=split)
    except Exception as error:  # of any kind: it is the result
        return Traced(not_traced=short_reason(error), num_names=num_names)
    if pipe.num_stages < 2:
        return Traced(not_traced="has one stage in spite of the split", num_names=num_names)
    stages = [pipe.get_stage_module(stage) for stage in range(pipe.num_stages)]
    names = {n for stage in stages for n, _ in stage.named_parameters()}
    kept = sum(n in names for n, _ in plain.named_parameters())
    not_run = _wrong(pipe, plain, inputs)
    return Traced("", not_run, not_run or _wrong(pipe, plain, other), kept, num_names)


def _middle(model: nn.Module, inputs: Any) -> str:
    """Return the name of the module in the middle of those that Stageline finds."""
    layers = record_model(deepcopy(model), inputs, {}, min_layers=2).layers
    names = [layer.name for layer in layers if "@" not in layer.name]
    return names[len(names) // 2]


def _wrong(pipe: nn.Module, plain: nn.Module, inputs: Any) -> str:
    """Return why the traced model does not compute what the plain one does, or nothing."""
    args, kwargs = call_arguments(plain, inputs, {})
    try:
        torch.manual_seed(0)
        found = trees.tensors(pipe(*args, **kwargs))
    except Exception as error:  # of any kind: it is the result
        return short_reason(error)
    torch.manual_seed(0)
    wanted = trees.tensors(plain(*args, **kwargs))
    same = len(found) == len(wanted) and all(
        a.shape == b.shape and torch.allclose(a, b, atol=1e-5)
        for a, b in zip(found, wanted, strict=True)
    )
    return "" if same else "computes something else"
