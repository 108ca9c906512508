"""Skip connections between layers of a sequence: named values that one stashes, another pops."""

from stageline.torchgpipe.skip.namespace import Namespace
from stageline.torchgpipe.skip.skippable import pop, skippable, stash
from stageline.torchgpipe.skip.verify import verify_skippables

__all__ = ["Namespace", "pop", "skippable", "stash", "verify_skippables"]
