"""A drop-in for torchgpipe 0.0.7: its `GPipe`, skips and balancing on Stageline's runtime."""

from stageline.torchgpipe.checkpoint import is_checkpointing, is_recomputing
from stageline.torchgpipe.gpipe import GPipe

__all__ = ["GPipe", "is_checkpointing", "is_recomputing"]
