"""Every private name of torch that Stageline uses, each behind a function with a plain name.

A torch release may remove a private name without notice. So they are used in this file only, with
the reason, and with a public fallback where there is one. `PRIVATE_NAMES` lists them: tests look
each one up, and fail if a private name is used in any other file or is not listed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import thread as executor_threads
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn, overrides
from torch import distributed as dist
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.nn.modules.batchnorm import _BatchNorm as BatchNormBase
from torch.nn.modules.batchnorm import _NormBase as NormBase
from torch.nn.modules.dropout import _DropoutNd as DropoutBase
from torch.optim import Optimizer
from torch.utils import _python_dispatch as dispatch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.distributed_c10d import Store

__all__ = [  # classes and modules of torch that only have a private address
    "BatchNormBase",
    "DataDependentOutputException",
    "DropoutBase",
    "FakeTensor",
    "FakeTensorMode",
    "NormBase",
    "TorchDispatchMode",
    "pytree",
]

PRIVATE_NAMES = (
    "torch.Tensor._version",
    "torch.Tensor._base",
    "torch.Tensor._backward_hooks",
    "torch.Tensor._post_accumulate_grad_hooks",
    "torch.Tensor._make_subclass",
    "torch.autograd.Variable._execution_engine",
    "torch._C.DisableTorchFunctionSubclass",
    "torch._C._will_engine_execute_node",
    "torch._C._autograd._top_saved_tensors_default_hooks",
    "torch._C._functorch.maybe_current_level",
    "torch.autograd.forward_ad._current_level",
    "torch.overrides._get_current_function_mode_stack",
    "torch.overrides._push_mode",
    "torch.overrides._pop_mode",
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack",
    "torch.utils._python_dispatch._push_mode",
    "torch.utils._python_dispatch._pop_mode",
    "torch.utils._python_dispatch.TorchDispatchMode",
    "torch.utils._pytree.SUPPORTED_NODES",
    "torch._subclasses.fake_tensor.FakeTensor",
    "torch._subclasses.fake_tensor.FakeTensorMode",
    "torch._subclasses.fake_tensor.DataDependentOutputException",
    "torch.nn.Module._parameters",
    "torch.nn.Module._buffers",
    "torch.nn.Module._modules",
    "torch.nn.Module._non_persistent_buffers_set",
    "torch.nn.Module._forward_hooks",
    "torch.nn.Module._forward_pre_hooks",
    "torch.nn.Module._backward_hooks",
    "torch.nn.Module._backward_pre_hooks",
    "torch.nn.Module._compiled_call_impl",
    "torch.nn.modules.batchnorm._BatchNorm",
    "torch.nn.modules.batchnorm._NormBase",
    "torch.nn.modules.dropout._DropoutNd",
    "torch.ops.aten.rand.default._schema",
    "torch.optim.Optimizer._optimizer_step_pre_hooks",
    "torch.optim.Optimizer._optimizer_step_post_hooks",
    "torch.distributed.distributed_c10d._get_default_store",
    "torch.distributed.distributed_c10d._set_pg_timeout",
    "concurrent.futures.thread._shutdown",  # Python's own, but as private
)

# Attributes that only instances have, so that a test looks at what they do instead.
PRIVATE_ATTRIBUTES = ("_orig_mod", "_opt_called", "_cdata")

# Attributes in which nn.Module keeps its parameters, buffers and children.
MODULE_TABLES = ("_parameters", "_buffers", "_modules")
MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
Hook = Callable[..., Any]
SavedTensorHooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


# Tensors


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor's memory was changed; inference tensors do not count it."""
    return 0 if tensor.is_inference() else tensor._version


def view_base(tensor: Tensor) -> Tensor:
    """Return the tensor that this one is a view of, or the tensor itself."""
    return tensor if tensor._base is None else tensor._base


def storage_identity(tensor: Tensor) -> int:
    """Return what tensors in the same memory have in common; meta tensors have no address."""
    return int(tensor.untyped_storage()._cdata)


def gradient_hooks(tensor: Tensor) -> list[Hook]:
    """Return the hooks of `register_hook`, which see a gradient before it is added."""
    found: Mapping[int, Hook] = tensor._backward_hooks or {}
    return list(found.values())


def post_accumulate_hooks(tensor: Tensor) -> list[Hook]:
    """Return the hooks of `register_post_accumulate_grad_hook`, called after a gradient is added.

    Tensors that are no leaves have none.
    """
    found: Mapping[int, Hook] = getattr(tensor, "_post_accumulate_grad_hooks", None) or {}
    return list(found.values())


def has_gradient_hooks(tensor: Tensor) -> bool:
    """Return whether a hook of either kind sees the gradients of a tensor."""
    hooks = tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None)
    return bool(hooks)


def make_subclass(kind: type[Tensor], data: Tensor, *, requires_grad: bool) -> Any:
    """Return a tensor of a subclass in the memory of `data`, without running its `__init__`.

    Within it torch's functions do not return the subclass: the class may wrap their results.
    """
    with without_subclass_functions():
        return Tensor._make_subclass(kind, data.detach(), requires_grad)


def without_subclass_functions() -> AbstractContextManager[None]:
    """Return a context in which subclasses of Tensor do not see torch's functions."""
    context: AbstractContextManager[None] = torch._C.DisableTorchFunctionSubclass()
    return context


# Autograd

_ENGINE: Any = getattr(torch.autograd.Variable, "_execution_engine", None)


def run_backward(
    roots: Sequence[Any],  # tensors and gradient edges; torch takes both at a time
    seeds: Sequence[Tensor],
    leaves: Sequence[Tensor] = (),
    *,
    accumulate: bool = True,
) -> tuple[Tensor | None, ...]:
    """Run a backward: add to `.grad` of the leaves, of all if none are given.

    Without `accumulate` return the gradients of the leaves, and keep the graph.

    `torch.autograd.backward` checks symbolic shapes in Python before it starts, at 35 µs a call,
    twice what the engine needs for a small graph; ranks that share an interpreter wait for each
    other there. So the engine is called directly, and the public functions are the fallback.
    """
    if _ENGINE is not None:
        keep_graph, allow_unreachable = not accumulate, True
        found: tuple[Tensor | None, ...] = _ENGINE.run_backward(
            tuple(roots),
            tuple(seeds),
            keep_graph,
            False,  # no graph of the backward itself
            tuple(leaves),
            allow_unreachable,
            accumulate,
        )
        return found
    if accumulate:
        torch.autograd.backward(roots, seeds, inputs=leaves or None)
        return ()
    return torch.autograd.grad(roots, leaves, seeds, retain_graph=True, allow_unused=True)


def will_execute(node: Any) -> bool | None:
    """Return whether the backward that runs now will reach a node; None if torch cannot tell.

    Raise RuntimeError for a leaf whose gradient `torch.autograd.grad` returns. There is no public
    way to ask.
    """
    ask = getattr(torch._C, "_will_engine_execute_node", None)
    return None if ask is None else bool(ask(node))


def saved_tensor_hooks() -> SavedTensorHooks | None:
    """Return the innermost `saved_tensors_hooks` of this thread, which are the ones in effect."""
    found: SavedTensorHooks | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return found


def is_inside_transform() -> bool:
    """Return whether a transform of `torch.func` is running."""
    return torch._C._functorch.maybe_current_level() is not None


def is_forward_mode_active() -> bool:
    """Return whether any thread is within a level of forward-mode differentiation."""
    return forward_ad._current_level >= 0


# Modes that see calls of torch


def function_modes() -> tuple[Any, ...]:
    """Return the `TorchFunctionMode`s of this thread, outermost first."""
    return tuple(overrides._get_current_function_mode_stack())  # type: ignore[no-untyped-call]


def dispatch_modes() -> tuple[Any, ...]:
    """Return the `TorchDispatchMode`s of this thread, outermost first, without torch's own."""
    modes = dispatch._get_current_dispatch_mode_stack()
    return tuple(mode for mode in modes if not mode.is_infra_mode())


@contextmanager
def active_modes(function: Sequence[Any], dispatched: Sequence[Any]) -> Iterator[None]:
    """Let modes of another thread see the calls of this one.

    Entering a mode by `with` would run its `__enter__` a second time.
    """
    pushed: list[Any] = []
    try:
        for where, modes in ((overrides, function), (dispatch, dispatched)):
            for mode in modes:
                where._push_mode(mode)
                pushed.append(where)
        yield
    finally:
        for where in reversed(pushed):
            where._pop_mode()


def operator_schema(operator: Any) -> Any:
    """Return the schema of an operator; None for one that takes functions."""
    return getattr(operator, "_schema", None)


# Modules


def parameter_table(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the dict of a module's own parameters.

    `named_parameters()` omits repeated ones, and cannot replace one.
    """
    return module._parameters


def buffer_table(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the dict of a module's own buffers, for the same reason."""
    return module._buffers


def is_persistent(module: nn.Module, buffer: str) -> bool:
    """Return whether one of the module's own buffers is part of its `state_dict`."""
    return buffer not in module._non_persistent_buffers_set


def child_table(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the dict of a module's children; `named_children()` omits repeated ones."""
    return module._modules


def shallow_copy(module: nn.Module) -> nn.Module:
    """Return a module with the same attributes, whose tables of tensors and children are copies."""
    made = module.__new__(type(module))
    vars(made).update(vars(module))
    for table in MODULE_TABLES:
        vars(made)[table] = dict(vars(module)[table])
    return made


def has_hooks(module: nn.Module) -> bool:
    """Return whether a forward or backward hook is registered on a module."""
    return any(getattr(module, name) for name in MODULE_HOOKS)


def has_backward_hooks(module: nn.Module) -> bool:
    """Return whether a hook runs before or after a module's backward."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def has_forward_hooks(module: nn.Module) -> bool:
    """Return whether a hook runs before or after a module's forward."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def has_forward_pre_hooks(module: nn.Module) -> bool:
    """Return whether a hook runs before a module's forward."""
    return bool(module._forward_pre_hooks)


def is_compiled(module: nn.Module) -> bool:
    """Return whether `torch.compile(module)` or `module.compile()` compiled any part of it."""
    return any(
        hasattr(part, "_orig_mod") or getattr(part, "_compiled_call_impl", None) is not None
        for part in module.modules()
    )


# Optimizers


def mark_as_stepped(optimizer: Optimizer) -> None:
    """Tell learning-rate schedulers that the optimizer has stepped.

    They warn of a wrong order otherwise if the very first step was skipped.
    """
    optimizer._opt_called = True  # type: ignore[attr-defined]


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Return whether a hook runs before or after the optimizer's step."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


# Processes and threads


def default_store() -> Store:
    """Return the key-value store that the default process group uses."""
    store: Store = dist.distributed_c10d._get_default_store()
    return store


def set_group_timeout(group: ProcessGroup, timeout: timedelta) -> None:
    """Change the timeout of a process group that exists already."""
    dist.distributed_c10d._set_pg_timeout(timeout, group)


def is_interpreter_exiting() -> bool:
    """Return whether Python waits for the threads of executors in order to exit.

    `sys.is_finalizing()` becomes true only after these threads have ended.
    """
    return bool(getattr(executor_threads, "_shutdown", False))
