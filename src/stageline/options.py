"""Options of a pipeline that few need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, dtype


@dataclass(frozen=True)
class Options:
    """Options that `Pipeline` takes beside its parameters.

    `seed` decides all random numbers. With `count_fn`, which returns the number of tokens of a
    target, say, `loss_fn` returns a sum, and the total count divides it. `batch_norm` is
    "minibatch" or "microbatch": how often running statistics are updated. `accumulate` is "exact",
    or "fused" to add weight gradients inside matrix products: with another rounding, and faster
    only if the products are large. Or it is a type, such as torch.float32 or "float32": gradients
    of weights with fewer bits are added in it, and their `.grad` has this type.
    `embedding_rows` adds the gradients of embeddings from 4 MiB on to the rows that have tokens,
    instead of a gradient of the whole table: faster, in less memory, with the same bits; False does
    what autograd does.
    `offload` keeps activations in host memory until their backward. `max_norm` clips the gradients
    of a pipeline with an `optimizer_fn`. `timeout` is how many seconds a process waits for others.
    Processes of one machine exchange tensors through shared memory, and replicas sum gradients
    through it, unless `shared_memory` is False: then over gloo, as between machines.
    `check_streams` treats ranks on CPU as accelerators: streams are simulated, messages between
    processes go over channels with NCCL's rules, and memory that is used in no certain order
    raises `StreamOrderError`. Processes with accelerators tell each other the forms of messages in
    the first step with batches of a size; without `fixed_message_forms`, with each message, which
    costs the host a wait for each.

    Two are for models whose forward is recorded, and may be given to `Pipeline` itself as well:
    `opaque` names modules that are never cut, and `cut_at` the layers that stages begin with.

    >>> Options(seed=1).batch_norm
    'minibatch'
    """

    seed: int = 0
    count_fn: Callable[[Any], float | Tensor] | None = None
    batch_norm: str = "minibatch"
    accumulate: str | dtype = "exact"
    embedding_rows: bool = True
    offload: bool = False
    max_norm: float | None = None
    timeout: float = 60.0
    shared_memory: bool = True
    check_streams: bool = False
    fixed_message_forms: bool = True
    opaque: Sequence[str] = ()
    cut_at: Sequence[str] = ()
