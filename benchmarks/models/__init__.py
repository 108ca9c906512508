"""Real models, as people have them, and the table of how they train in a pipeline."""

from importlib.util import find_spec
from typing import Any

import torch

# There is no CPU build of torchvision. Beside a CPU build of torch its extension cannot be loaded,
# and its import fails for want of these operators, as does that of timm and transformers behind it.
# A library's operators end with it, so it is kept.
TORCHVISION_OPERATORS: Any = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch's own
if find_spec("torchvision") and not hasattr(torch.ops.torchvision, "nms"):
    for name in ("nms", "qnms"):
        signature = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        TORCHVISION_OPERATORS.define(name + signature)
