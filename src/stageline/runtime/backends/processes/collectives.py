"""What the processes of a pipeline tell each other beside its messages: losses, norms, outputs.

`Alone` is one process with all ranks, where there is nobody to tell. `Group` has one rank in each
process; all of them make the same calls in the same order.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import reduce, wraps
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stageline.errors import ModelError, PlanError
from stageline.runtime import trees
from stageline.runtime.backends.processes import exchange
from stageline.runtime.backends.processes import packing as wire
from stageline.runtime.backends.processes.clock import SHIFT
from stageline.runtime.backends.processes.groups import Place
from stageline.runtime.backends.processes.message_shapes import Form, Shape
from stageline.runtime.engine.loop import Moment, Step
from stageline.runtime.exactness.batch_norm import NormMoments
from stageline.runtime.exactness.tied_weights import TiedWeights
from stageline.runtime.optimizers.stage_optimizers import Update

T = TypeVar("T")
Method = TypeVar("Method", bound=Callable[..., Any])
LOSS_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LAST_WORDS = 5.0  # seconds in which losses that nobody has read may still arrive
BUCKET = 25 * 2**20  # bytes that are summed at once


class Guard(Protocol):
    """Surrounds what all ranks do together: raises on all of them if one does not take part."""

    def __call__(self, what: str, task: str | None = None) -> AbstractContextManager[None]: ...


def _unguarded(what: str, task: str | None = None) -> AbstractContextManager[None]:  # noqa: ARG001
    return nullcontext()


class Loss(NamedTuple):
    """Of one micro-batch, and what it counts for."""

    loss: Tensor
    weight: float


class Told(NamedTuple):
    """What is known of a step when it is done."""

    losses: list[Loss]  # by micro-batch
    updates: dict[int, Update]  # by stage, if the pipeline steps the optimizer


Moments = dict[int, list[Moment]]  # by rank


class Peers(Protocol):
    """Who else takes part."""

    @property
    def replica(self) -> int:
        """Which of the pipeline's replicas this is."""

    def has(self, rank: int) -> bool:
        """Whether this rank is in this process."""

    def agree(self, signature: Mapping[str, str]) -> None:
        """Raise on every rank if they are not about to do the same."""

    def total(self, count: float) -> float:
        """What counts in all replicas together."""

    def apart(self) -> AbstractContextManager[None]:
        """As if this replica were the only one: nothing of others is added to what it computes."""

    def begin(self, parameters: Iterable[nn.Parameter]) -> None:
        """Before a step: gradients of earlier steps are set aside, if there are replicas."""

    def reduce(self, parameters: Iterable[nn.Parameter]) -> None:
        """Start to sum gradients over replicas, beside what goes on."""

    def seen_by_replicas(self, own: NormMoments) -> NormMoments:
        """Statistics of this process's part of the model, of all replicas in their order."""

    def finish(self) -> None:
        """After a step: gradients are those of all replicas, added to those of earlier steps."""

    def told(self, step: Step) -> Callable[[], Told]:
        """How to come by what all ranks know of a step, when it is wanted."""

    def norms(self, own: Mapping[int, Tensor], count: int) -> list[Tensor]:
        """Those of all parameters that have a gradient, by their number in the model."""

    def output(self, made: Any) -> Any:
        """What the last rank made."""

    def moments(self, own: Moments) -> Moments:
        """Of all ranks."""

    def share_tied(self, tied: TiedWeights, homes: Sequence[int]) -> None:
        """Gradients of weights that layers on several ranks use; `homes` are the layers' ranks."""

    def share_state(self, modules: Iterable[nn.Module], homes: Sequence[int]) -> None:
        """Parameters and buffers of all layers, from the ranks that hold them."""

    def share_weights(self, tied: TiedWeights, homes: Sequence[int]) -> None:
        """Weights that layers on several ranks use are those of the first such rank."""

    def share_input_gradients(self, step: Step) -> None:
        """What made the inputs is on all ranks, and so are their gradients."""

    def verdict(self, own: str | None) -> str | None:
        """The first rank's that has something to say."""

    def share_with_siblings(self, tensors: Iterable[Tensor]) -> None:
        """A stage on several ranks has the weights and buffers that the first of them has."""

    def everywhere(self, act: Callable[[], T]) -> list[T]:
        """What each process makes of it, those of replicas too; if one raises, all do."""

    def passed(self, tree: Any, source: int, target: int) -> Any:
        """What one rank has, on another; both call it, and the second gives None."""

    def noted(self) -> AbstractContextManager[None]:
        """Around code of the user's: what it raises is told to ranks that wait for this one."""

    def close(self) -> None:
        """Nothing more will be told."""


class Alone:
    """All ranks are here."""

    replica = 0

    def has(self, rank: int) -> bool:  # noqa: ARG002  whichever it is
        return True

    def agree(self, signature: Mapping[str, str]) -> None:
        pass

    def total(self, count: float) -> float:
        return count

    def apart(self) -> AbstractContextManager[None]:
        return nullcontext()

    def begin(self, parameters: Iterable[nn.Parameter]) -> None:
        pass

    def reduce(self, parameters: Iterable[nn.Parameter]) -> None:
        pass

    def seen_by_replicas(self, own: NormMoments) -> NormMoments:
        return own

    def finish(self) -> None:
        pass

    def told(self, step: Step) -> Callable[[], Told]:
        losses = [Loss(step.losses[i], target.weight) for i, target in enumerate(step.targets)]
        told = Told(losses, dict(sorted(step.updates.items())))
        return lambda: told

    def norms(self, own: Mapping[int, Tensor], count: int) -> list[Tensor]:  # noqa: ARG002
        return list(own.values())

    def output(self, made: Any) -> Any:
        return made

    def moments(self, own: Moments) -> Moments:
        return own

    def share_tied(self, tied: TiedWeights, homes: Sequence[int]) -> None:
        pass

    def share_state(self, modules: Iterable[nn.Module], homes: Sequence[int]) -> None:
        pass

    def share_weights(self, tied: TiedWeights, homes: Sequence[int]) -> None:
        pass

    def share_input_gradients(self, step: Step) -> None:
        pass

    def verdict(self, own: str | None) -> str | None:
        return own

    def share_with_siblings(self, tensors: Iterable[Tensor]) -> None:
        pass

    def everywhere(self, act: Callable[[], T]) -> list[T]:
        return [act()]

    def passed(self, tree: Any, source: int, target: int) -> Any:  # noqa: ARG002  both are here
        return tree

    def noted(self) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None:
        pass


def together(what: str) -> Callable[[Method], Method]:
    """What all ranks do at the same time: one that does not take part is told of by the guard."""

    def guarded(method: Method) -> Method:
        @wraps(method)
        def act(self: Group, *args: Any) -> Any:
            with self.guard(what):
                return method(self, *args)

        return cast("Method", act)

    return guarded


class Group:
    """One rank is here, the others in the processes of a group. State: gradients on their way."""

    def __init__(self, place: Place, last: int, num_microbatches: int, num_stages: int) -> None:
        self.place, self.num_microbatches, self.num_stages = place, num_microbatches, num_stages
        self.is_apart = False  # see `apart`
        self.guard: Guard = _unguarded
        self.rank = dist.get_rank(self.group)
        self.last = last  # the rank of the last stage, which on a V is not the last rank
        self.before: dict[nn.Parameter, Tensor] = {}  # gradients of earlier steps
        self.flying: list[tuple[Any, list[Tensor], list[nn.Parameter]]] = []
        self.telling: list[Any] = []  # losses on their way; they must have arrived before the end
        weakref.finalize(self, _arrive, self.telling, place)

    @property
    def group(self) -> dist.ProcessGroup:
        return self.place.pipeline

    @property
    def replicas(self) -> dist.ProcessGroup | None:
        return None if self.is_apart else self.place.replicas

    @property
    def replica(self) -> int:
        return self.place.replica

    def has(self, rank: int) -> bool:
        return rank == self.rank

    @together("what they are about to do")
    def agree(self, signature: Mapping[str, str]) -> None:
        found = self._gathered(dict(signature))
        self.place.watch.is_starting = False
        for what, here in found[0].items():
            others = {rank: each[what] for rank, each in enumerate(found) if each[what] != here}
            if others:
                rank, there = next(iter(others.items()))
                raise ModelError(
                    f"{what}: rank 0 has {here}, but rank {rank} has {there}: all ranks make the "
                    "same calls with the same arguments"
                )

    @together("what counts")
    def total(self, count: float) -> float:
        if self.replicas is None:
            return count
        counted = torch.tensor(count, dtype=torch.float64)
        dist.all_reduce(counted, group=self.replicas)
        return float(counted)

    @contextmanager
    def apart(self) -> Iterator[None]:
        self.is_apart = True
        try:
            yield
        finally:
            self.is_apart = False

    def begin(self, parameters: Iterable[nn.Parameter]) -> None:
        self.before, self.flying = {}, []
        if self.replicas is not None:
            for parameter in parameters:
                if parameter.grad is not None:
                    self.before[parameter], parameter.grad = parameter.grad, None

    def reduce(self, parameters: Iterable[nn.Parameter]) -> None:
        if self.replicas is not None:
            for bucket in _buckets(parameters):
                buffer = _flat(bucket)
                work = dist.all_reduce(buffer, group=self.replicas, async_op=True)
                self.flying.append((work, [buffer], bucket))
        elif self.place.siblings is not None:  # few, and added up in their order
            for bucket in _buckets(parameters):
                buffer = _flat(bucket)
                count = dist.get_world_size(self.place.siblings)
                found = [torch.empty_like(buffer) for _ in range(count)]
                work = dist.all_gather(found, buffer, self.place.siblings, async_op=True)
                self.flying.append((work, found, bucket))

    @together("statistics")
    def seen_by_replicas(self, own: NormMoments) -> NormMoments:
        others = self.replicas or self.place.siblings
        if others is None:
            return own
        found = exchange.gathered(own, others)
        numbers = sorted({number for seen in found for number in seen})
        joined = {n: [pair for seen in found for pair in seen.get(n, [])] for n in numbers}
        if self.place.siblings is None:
            return joined
        return {n: sorted(pairs, key=lambda pair: pair[0]) for n, pairs in joined.items()}

    @together("gradients")
    def finish(self) -> None:
        for work, buffers, bucket in self.flying:
            work.wait()
            _unflatten(reduce(torch.add, buffers), bucket)
        for parameter, gradient in self.before.items():
            if parameter.grad is not None:
                gradient.add_(parameter.grad)
            parameter.grad = gradient
        self.before, self.flying = {}, []

    def told(self, step: Step) -> Callable[[], Told]:
        """Sent at once, awaited when it is read: no rank waits for another until then.

        Each number is told by one process and 0 by all others, which changes no bit of it.
        """
        num_losses = self.place.num_replicas * self.num_microbatches
        table = torch.zeros(3, num_losses + self.num_stages, dtype=torch.float64)
        if self.place.speaks:
            for i, loss in step.losses.items():
                facts = [float(loss), step.targets[i].weight, 1.0 + LOSS_TYPES.index(loss.dtype)]
                column = self.place.replica * self.num_microbatches + i
                table[:, column] = torch.tensor(facts, dtype=torch.float64)
            for stage, update in step.updates.items():
                if self.place.replica == 0 and self._is_first_of_stage:
                    facts = [update.norm, update.is_skipped + 2.0 * update.is_redone, 1.0]
                    table[:, num_losses + stage] = torch.tensor(facts, dtype=torch.float64)
        work = dist.all_reduce(table, group=self.place.everyone, async_op=True)
        self.telling[:] = [other for other in self.telling if not other.is_completed()] + [work]

        def fetch() -> Told:
            with self.guard("losses"):
                work.wait()
            rows = table.t().tolist()
            losses = [
                Loss(torch.tensor(loss, dtype=LOSS_TYPES[int(kind) - 1]), weight)
                for loss, weight, kind in rows[:num_losses]
                if kind
            ]
            updates = {
                stage: Update(flags in (1, 3), norm, flags in (2, 3))
                for stage, (norm, flags, is_there) in enumerate(rows[num_losses:])
                if is_there
            }
            return Told(losses, updates)

        return fetch

    @together("norms")
    def norms(self, own: Mapping[int, Tensor], count: int) -> list[Tensor]:
        """Every number is that of one rank, plus zeros, which change no bit."""
        table = torch.zeros(2, count, dtype=torch.float64)
        for number, norm in own.items():
            table[0, number], table[1, number] = norm, 1.0
        dist.all_reduce(table, group=self.group)
        kind = next((norm.dtype for norm in own.values()), torch.get_default_dtype())
        return [norm.to(kind) for norm, is_there in zip(*table, strict=True) if is_there]

    @together("the output")
    def output(self, made: Any) -> Any:
        described = Shape.of(made).described if self.rank == self.last else None
        shape = Shape.from_description(exchange.broadcast(described, self.last, self.group))
        tensors = trees.tensors(made) if self.rank == self.last else []
        return shape.around(self._broadcast(tensors, shape.forms, self.last))

    @together("a trace")
    def moments(self, own: Moments) -> Moments:
        found = self._gathered([_shifted(moment, SHIFT) for moment in own.get(self.rank, [])])
        return {
            rank: [_shifted(moment, -SHIFT) for moment in row] for rank, row in enumerate(found)
        }

    @together("gradients of tied weights")
    def share_tied(self, tied: TiedWeights, homes: Sequence[int]) -> None:
        spread = [
            (weight, uses)
            for weight, uses in tied.by_weight
            if len({homes[number] for number, _ in uses}) > 1
        ]
        told = self._gathered([weight in tied.hooked for weight, _ in spread]) if spread else []
        for place, (_, uses) in enumerate(spread):
            are_hooked = {homes[number]: told[homes[number]][place] for number, _ in uses}
            if any(are_hooked.values()) and not all(are_hooked.values()):
                raise ModelError(
                    "a weight that layers on several ranks use has hooks on "
                    f"{[rank for rank, is_hooked in are_hooked.items() if is_hooked]} only, but is "
                    f"used on {list(are_hooked)}: register hooks on all ranks"
                )
            for number, double in uses:
                if all(are_hooked.values()):
                    self._share_apart(double, tied.gradients_by_microbatch, homes[number])
                    continue
                forms = [Form.of(double)]
                gradient = self._broadcast([double.grad], forms, homes[number])[0]
                if not double.is_meta:  # it is used here as well
                    double.grad = gradient

    def _share_apart(
        self, double: nn.Parameter, apart: dict[nn.Parameter, dict[int, Tensor]], home: int
    ) -> None:
        """Gradients of a double by micro-batch, of a weight with hooks."""
        for microbatch in range(self.num_microbatches):
            own = apart.get(double, {}).get(microbatch)
            gradient = self._broadcast([own], [Form.of(double)], home)[0]
            if not double.is_meta and gradient is not None:
                apart.setdefault(double, {})[microbatch] = gradient

    @together("the model")
    def share_state(self, modules: Iterable[nn.Module], homes: Sequence[int]) -> None:
        for module, home in zip(modules, homes, strict=True):
            tensors = [*module.parameters(), *module.buffers()]
            forms = [Form.of(tensor) for tensor in tensors]
            for tensor, found in zip(tensors, self._broadcast(tensors, forms, home), strict=True):
                if home != self.rank and found is not None:
                    tensor.data.copy_(found.detach())

    @together("tied weights")
    def share_weights(self, tied: TiedWeights, homes: Sequence[int]) -> None:
        for weight, uses in tied.by_weight:
            ranks = [homes[number] for number, _ in uses]
            if len(set(ranks)) > 1:
                found = self._broadcast([weight], [Form.of(weight)], ranks[0])[0]
                if not weight.is_meta and found is not None:
                    weight.data.copy_(found)

    @together("gradients of inputs")
    def share_input_gradients(self, step: Step) -> None:
        if any(t.requires_grad for part in step.inputs for t in trees.tensors(part)):
            found = self._gathered(step.input_gradients)
            step.input_gradients = {key: grads for each in found for key, grads in each.items()}

    @together("a verdict")
    def verdict(self, own: str | None) -> str | None:
        return next((text for text in self._gathered(own) if text is not None), None)

    def everywhere(self, act: Callable[[], T]) -> list[T]:
        try:
            own = act()
        except Exception as error:
            self._from_all((None, str(error) or type(error).__name__))
            raise
        found = self._from_all((own, ""))
        for number, (_, text) in enumerate(found):
            if text:
                raise PlanError(f"rank {number}: {text}")
        return [cast("T", each) for each, _ in found]

    @together("a plan")
    def _from_all(self, own: tuple[T | None, str]) -> list[tuple[T | None, str]]:
        return exchange.gathered(own, self.place.everyone)

    @together("layers that move")
    def passed(self, tree: Any, source: int, target: int) -> Any:
        if self.rank == source:
            shape = Shape.of(tree)
            exchange.send(shape.described, target, self.group)
            buffer = wire.Packing.of(shape.forms).pack(trees.tensors(tree))
            dist.send(buffer, self._global(target), self.group)
            return None
        shape = Shape.from_description(exchange.receive(source, self.group))
        packing = wire.Packing.of(shape.forms)
        buffer = packing.empty()
        dist.recv(buffer, self._global(source), self.group)
        return shape.around(packing.unpack(buffer)[0])

    @together("the weights of a stage")
    def share_with_siblings(self, tensors: Iterable[Tensor]) -> None:
        siblings = self.place.siblings
        if siblings is not None and dist.get_world_size(siblings) > 1:
            for tensor in tensors:
                dist.broadcast(tensor.data, dist.get_global_rank(siblings, 0), siblings)

    @contextmanager
    def noted(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.place.watch.note(error)
            raise

    @property
    def _is_first_of_stage(self) -> bool:
        return self.place.siblings is None or dist.get_rank(self.place.siblings) == 0

    def close(self) -> None:
        """The groups take file descriptors, ten for a pipeline of two ranks."""
        _arrive(self.telling, self.place)
        self.place.close()

    def _gathered(self, own: T) -> list[T]:
        """By rank, what each of them has."""
        return exchange.gathered(own, self.group)

    def _broadcast(
        self, tensors: Sequence[Tensor | None], forms: Sequence[Form], source: int
    ) -> list[Tensor | None]:
        is_here = source == self.rank
        packing = wire.Packing.of(forms)
        buffer = packing.pack(tensors) if is_here else packing.empty()
        dist.broadcast(buffer, self._global(source), self.group)
        return [t if t is None else t.detach() for t in packing.unpack(buffer)[0]]

    def _global(self, rank: int) -> int:
        return dist.get_global_rank(self.group, rank)


def _shifted(moment: Moment, by: float) -> Moment:
    """To a clock that all processes have, and back; 0.0 for `sent` means that nothing was."""
    action, asked, sent, start, end, minibatch = moment
    return Moment(action, asked + by, sent + by if sent else 0.0, start + by, end + by, minibatch)


def _arrive(telling: list[Any], place: Place) -> None:
    """A process that ends in the middle of a reduction aborts, whatever it has achieved."""
    try:
        for work in telling:
            work.wait(timedelta(seconds=LAST_WORDS))
    except RuntimeError:  # the others are gone
        place.hang_up()
    telling.clear()


def _buckets(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Of one type each, and not much larger than `BUCKET`."""
    buckets: list[list[nn.Parameter]] = []
    size = 0
    for parameter in parameters:
        if not buckets or size > BUCKET or parameter.dtype != buckets[-1][0].dtype:
            buckets.append([])
            size = 0
        buckets[-1].append(parameter)
        size += parameter.numel() * parameter.element_size()
    return buckets


def _flat(bucket: list[nn.Parameter]) -> Tensor:
    """Their gradients behind each other, and behind these for each of them whether it has one."""
    parts = [
        torch.zeros(local(p).numel(), dtype=p.dtype, device=p.device)
        if p.grad is None
        else local(p.grad).reshape(-1)
        for p in bucket
    ]
    there = [float(p.grad is not None) for p in bucket]
    return torch.cat([*parts, torch.tensor(there, dtype=parts[0].dtype, device=parts[0].device)])


def _unflatten(buffer: Tensor, bucket: list[nn.Parameter]) -> None:
    sizes = [local(parameter).numel() for parameter in bucket]
    *parts, there = torch.split(buffer, [*sizes, len(bucket)])
    for parameter, part, is_there in zip(bucket, parts, there.tolist(), strict=True):
        if is_there:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            local(parameter.grad).copy_(part.view(local(parameter).shape))


def local(tensor: Tensor) -> Tensor:
    """This process's part of a tensor that several hold together."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part
