"""Gradients of large embeddings, added row by row: the bits of a plain loop, signs of zeros too."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F  # noqa: N812  as everybody calls it
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import stageline as sl
from stageline.runtime.stage import embedding_gradients
from stageline.runtime.stage.embedding_gradients import LargeTables
from stageline.torch_private import TorchDispatchMode
from stageline.zoo.plain import train_plainly

ROWS, WIDTH = 8200, 128  # just above 4 MiB
Run = Callable[[nn.Embedding, Tensor], None]


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(torch.uint8)


def assert_same_bits(found: Tensor | None, wanted: Tensor | None) -> None:
    assert (found is None) == (wanted is None)
    if found is not None and wanted is not None:
        assert found.layout == wanted.layout
        found, wanted = (t.to_dense() if t.is_sparse else t for t in (found, wanted))
        assert torch.equal(bits(found), bits(wanted))


@pytest.fixture
def additions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows by the number of tokens whenever rows are added."""
    counts: list[int] = []
    original = embedding_gradients._rows

    def rows(gradient: Tensor, indices: Tensor, *rest: Any) -> Tensor:
        counts.append(indices.numel())
        return original(gradient, indices, *rest)

    monkeypatch.setattr(embedding_gradients, "_rows", rows)
    return counts


# One table, with the bits of autograd


def tokens(seed: int, size: int = 96) -> Tensor:
    """Return tokens of which many are repeated, some of them often."""
    torch.manual_seed(seed)
    return torch.cat([torch.randint(0, ROWS, (size // 2,)), torch.randint(0, 7, (size // 2,))])


def weighted(x: Tensor) -> Tensor:
    """Return a sum in which all gradients differ, with zeros of both signs among them."""
    torch.manual_seed(x.numel())
    scale = torch.randn(x.shape, dtype=x.dtype)
    scale[..., 0], scale[..., 1] = 0.0, -0.0
    return (x * scale).sum()


def lookup(table: nn.Embedding, x: Tensor) -> None:
    weighted(table(x)).backward()  # type: ignore[no-untyped-call]  # torch's own


def two_lookups(table: nn.Embedding, x: Tensor) -> None:
    (weighted(table(x)) + weighted(table(x[:30]) * 3)).backward()  # type: ignore[no-untyped-call]


def lookups_around_a_product(table: nn.Embedding, x: Tensor) -> None:
    first = weighted(F.linear(torch.ones(3, WIDTH), table.weight))
    second = weighted(table(x))
    third = weighted(F.linear(torch.full((3, WIDTH), 0.3), table.weight))
    fourth, fifth = weighted(table(x[:20])), weighted(table(x.flip(0)))
    (first + second + third + fourth + fifth).backward()  # type: ignore[no-untyped-call]


def lookup_without_use(table: nn.Embedding, x: Tensor) -> None:
    table(x)
    weighted(table(x)).backward()  # type: ignore[no-untyped-call]


def penalty(table: nn.Embedding, x: Tensor) -> None:
    x = x if len(x) else torch.tensor([1])  # torch has no second derivative of no tokens
    y = weighted(table(x).tanh())
    (gradient,) = torch.autograd.grad(y, table.weight, create_graph=True)
    (y + gradient.square().sum()).backward()  # type: ignore[no-untyped-call]


def own_gradient(table: nn.Embedding, x: Tensor) -> None:
    (gradient,) = torch.autograd.grad(weighted(table(x)), table.weight)
    assert not gradient.is_sparse
    (weighted(table(x)) * gradient.sum()).backward()  # type: ignore[no-untyped-call]


def batched_gradients(table: nn.Embedding, x: Tensor) -> None:
    y = table(x)
    seeds = torch.stack([torch.ones_like(y), torch.full_like(y, 2.0)])
    (both,) = torch.autograd.grad(y, table.weight, seeds, is_grads_batched=True)
    weighted(table(x) * both.sum()).backward()  # type: ignore[no-untyped-call]


def transformed(table: nn.Embedding, x: Tensor) -> None:
    def loss(weight: Tensor) -> Tensor:
        return weighted(F.embedding(x, weight))

    found = torch.func.grad(loss)(table.weight.detach())
    (weighted(table(x)) * found.sum()).backward()


def forward_mode(table: nn.Embedding, x: Tensor) -> None:
    weight = table.weight.detach()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(weight, weight)  # type: ignore[no-untyped-call]
        tangent = forward_ad.unpack_dual(weighted(F.embedding(x, dual))).tangent  # type: ignore[no-untyped-call]
    (weighted(table(x)) * tangent).backward()


def checkpointed(table: nn.Embedding, x: Tensor, *, reentrant: bool) -> None:
    inside = torch.ones(1, requires_grad=True)  # without it a reentrant one has no backward
    y = checkpoint(lambda x, scale: table(x).tanh() * scale, x, inside, use_reentrant=reentrant)
    weighted(y).backward()  # type: ignore[no-untyped-call]


def under_autocast(table: nn.Embedding, x: Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        y = F.linear(table(x), torch.ones(4, WIDTH))
    weighted(y.float()).backward()  # type: ignore[no-untyped-call]


def changed_in_place(table: nn.Embedding, x: Tensor) -> None:
    weighted(table(x).mul_(2.0)).backward()  # type: ignore[no-untyped-call]


def with_gradient_hook(table: nn.Embedding, x: Tensor) -> None:
    def double(gradient: Tensor) -> Tensor:
        assert not gradient.is_sparse
        return gradient * 2

    handle = table.weight.register_hook(double)  # type: ignore[no-untyped-call]
    lookup(table, x)
    handle.remove()


def gradient_negated(table: nn.Embedding, x: Tensor) -> None:
    """All zeros become -0.0, and a dense gradient makes +0.0 of them."""
    if table.weight.grad is not None:
        table.weight.grad.neg_()
    lookup(table, x)


def gradient_replaced(table: nn.Embedding, x: Tensor) -> None:
    table.weight.grad = torch.full((ROWS, WIDTH), -0.0)
    lookup(table, x)


def gradient_of_other_strides(table: nn.Embedding, x: Tensor) -> None:
    if table.weight.grad is None:
        table.weight.grad = torch.zeros(2 * ROWS, WIDTH)[::2]
    lookup(table, x)


RUNS: dict[str, tuple[Run, bool]] = {  # and whether rows are added
    "one lookup": (lookup, True),
    "two lookups": (two_lookups, True),
    "lookups around a product": (lookups_around_a_product, True),
    "a lookup without use": (lookup_without_use, True),
    "a gradient penalty": (penalty, True),
    "torch.autograd.grad": (own_gradient, True),
    "batched gradients": (batched_gradients, True),
    "torch.func.grad": (transformed, True),
    "forward mode": (forward_mode, True),
    "a checkpoint": (partial(checkpointed, reentrant=False), True),
    "a reentrant checkpoint": (partial(checkpointed, reentrant=True), False),
    "autocast": (under_autocast, True),
    "output changed in place": (changed_in_place, True),
    "a hook on the table": (with_gradient_hook, False),
    "a gradient that is negated in between": (gradient_negated, False),
    "a gradient with negative zeros": (gradient_replaced, False),
    "a gradient of other strides": (gradient_of_other_strides, False),
}


def gradient(run: Run, make: Callable[[], nn.Embedding], *, in_rows: bool) -> Tensor | None:
    """Return the table's gradient after four micro-batches; the third has no tokens."""
    torch.manual_seed(0)
    table = make()
    tables = LargeTables({})
    for seed, size in ((1, 96), (2, 64), (3, 0), (4, 128)):
        if in_rows:
            with tables:
                run(table, tokens(seed, size))
        else:
            run(table, tokens(seed, size))
    return table.weight.grad


def assert_equal_to_autograd(run: Run, make: Callable[[], nn.Embedding]) -> None:
    assert_same_bits(gradient(run, make, in_rows=True), gradient(run, make, in_rows=False))


@pytest.mark.filterwarnings("ignore:grad and param do not obey", "ignore:.*torch.jit.script")
@pytest.mark.parametrize("case", RUNS)
def test_gradients_have_the_bits_of_autograd(case: str, additions: list[int]) -> None:
    run, is_added = RUNS[case]
    assert_equal_to_autograd(run, lambda: nn.Embedding(ROWS, WIDTH))
    assert bool(additions) == is_added


@pytest.mark.parametrize("num_threads", [2, 5])
def test_several_threads_add_in_the_same_order(num_threads: int, additions: list[int]) -> None:
    torch.set_num_threads(num_threads)  # which a fixture undoes
    assert_equal_to_autograd(two_lookups, lambda: nn.Embedding(ROWS, WIDTH))
    assert additions


KINDS: dict[str, tuple[dict[str, Any], bool]] = {  # and whether rows are added
    "padding": ({"padding_idx": 3}, True),
    "padding from the end": ({"padding_idx": -ROWS + 3}, True),
    "double": ({"dtype": torch.float64}, True),
    "bfloat16": ({"dtype": torch.bfloat16}, False),
    "scaled by frequency": ({"scale_grad_by_freq": True}, False),
    "renormalised": ({"max_norm": 0.5}, False),
    "sparse": ({"sparse": True}, False),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_embedding_has_the_bits_of_autograd(kind: str, additions: list[int]) -> None:
    options, is_added = KINDS[kind]
    rows = 2 * ROWS if options.get("dtype") is torch.bfloat16 else ROWS
    assert_equal_to_autograd(lookup, lambda: nn.Embedding(rows, WIDTH, **options))
    assert bool(additions) == is_added


def test_small_tables_frozen_ones_and_long_batches_are_left_to_autograd(
    additions: list[int],
) -> None:
    assert_equal_to_autograd(
        lambda table, x: lookup(table, x % 100), lambda: nn.Embedding(100, WIDTH)
    )
    assert_equal_to_autograd(
        lambda table, x: lookup(table, x.repeat(100)), lambda: nn.Embedding(ROWS, WIDTH)
    )
    frozen = nn.Embedding(ROWS, WIDTH).requires_grad_(False)
    with LargeTables({}):
        assert frozen(tokens(0)).grad_fn is None
        with torch.no_grad():
            assert nn.Embedding(ROWS, WIDTH)(tokens(0)).grad_fn is None
    assert max(additions, default=0) == 0


def test_tokens_of_32_bits_and_of_any_shape(additions: list[int]) -> None:
    def run(table: nn.Embedding, x: Tensor) -> None:
        lookup(table, x.int().view(2, -1, 4))

    assert_equal_to_autograd(run, lambda: nn.Embedding(ROWS, WIDTH))
    assert additions


def test_a_token_that_does_not_exist_is_refused_as_always() -> None:
    with LargeTables({}), pytest.raises(IndexError):
        nn.Embedding(ROWS, WIDTH)(torch.tensor([ROWS]))


# In a pipeline


class Both(nn.Module):
    """One table for source and target, and a second one for positions."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(ROWS, WIDTH, padding_idx=0)
        self.positions = nn.Embedding(ROWS, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1]).expand_as(x)
        both: Tensor = self.tokens(x) * self.tokens(x.flip(1)) + self.positions(places)
        return both


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def shared_table() -> sl.LayerSequence:
    body = [nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), nn.Linear(WIDTH, WIDTH), nn.GELU()]
    return sl.LayerSequence.of(nn.Sequential(Both(), *body, Mean(), nn.Linear(WIDTH, 5)))


def tied_head() -> sl.LayerSequence:
    head = nn.Linear(WIDTH, ROWS, bias=False)
    embed = nn.Embedding(ROWS, WIDTH)
    embed.weight = head.weight
    body = [nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)]
    return sl.LayerSequence.of(nn.Sequential(embed, *body, Mean(), head))


def batches() -> list[tuple[Tensor, Tensor]]:
    """Return a full batch, one with a short micro-batch, and one with fewer samples than those."""
    torch.manual_seed(5)
    made = []
    for size in (16, 13, 3):
        x = torch.randint(0, ROWS, (size, 6))
        made.append((torch.where(x > ROWS // 2, x % 4, x), torch.randint(0, 5, (size,))))
    return made


MODELS = {"shared table": shared_table, "tied head": tied_head}


def plain_weights(make: Callable[[], sl.LayerSequence]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    layers = make()
    optimizer = torch.optim.SGD(layers.modules.parameters(), lr=0.5)
    train_plainly(layers, F.cross_entropy, optimizer, batches(), num_microbatches=4)
    return dict(layers.modules.named_parameters())


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize(
    ("schedule", "backend"),
    [
        ("1f1b", "threads"),
        ("zb_h1", "serial"),
        ("zb_h1", "threads"),
        ("interleaved_1f1b", "serial"),
    ],
)
@pytest.mark.parametrize("model", MODELS)
def test_a_pipeline_has_the_bits_of_a_plain_loop(
    model: str, schedule: str, backend: str, recompute: str, additions: list[int]
) -> None:
    torch.manual_seed(0)
    layers = MODELS[model]()
    given: Any = {"schedule": schedule, "recompute": recompute, "backend": backend}
    with sl.Pipeline(layers, F.cross_entropy, num_ranks=2, num_microbatches=4, **given) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.5)
        for x, y in batches():
            pipe.step(x, y)
            optimizer.step()
            optimizer.zero_grad()
    for name, wanted in plain_weights(MODELS[model]).items():
        assert_same_bits(layers.modules.get_parameter(name), wanted)
    assert additions


def test_gradients_of_two_steps_and_of_the_user_are_added_to(additions: list[int]) -> None:
    def prepared() -> sl.LayerSequence:
        torch.manual_seed(0)
        layers = shared_table()
        for weight in layers.modules.parameters():
            weight.grad = torch.full_like(weight, -0.0)
        return layers

    found, wanted = prepared(), prepared()
    for layers in (found, wanted):
        layers.modules.eval()  # no dropout
    with sl.Pipeline(found, F.cross_entropy, num_ranks=2, num_microbatches=4) as pipe:
        for x, y in [*batches(), *batches()]:
            pipe.step(x, y)
    module = nn.Sequential(*(layer.module for layer in wanted))
    for x, y in [*batches(), *batches()]:
        count = min(4, len(x))
        for part, target in zip(x.tensor_split(count), y.tensor_split(count), strict=True):
            (F.cross_entropy(module(part), target) * (len(part) / len(x))).backward()  # type: ignore[no-untyped-call]
    for one, other in zip(found.modules.parameters(), wanted.modules.parameters(), strict=True):
        assert_same_bits(one.grad, other.grad)
    assert len(additions) > 20


@pytest.mark.parametrize(("in_rows", "count"), [(True, 1), (False, 0)])
def test_a_step_makes_one_gradient_of_the_whole_table(
    in_rows: bool, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It becomes `.grad`; without rows it is autograd that makes one for each micro-batch."""
    made: list[int] = []
    original = embedding_gradients._dense

    def dense(gradient: Tensor, indices: Tensor, padding: int, num_rows: int) -> Tensor:
        made.append(num_rows)
        return original(gradient, indices, padding, num_rows)

    monkeypatch.setattr(embedding_gradients, "_dense", dense)
    model = nn.Sequential(nn.Embedding(ROWS, WIDTH), Mean(), nn.Linear(WIDTH, 5))
    options = sl.Options(embedding_rows=in_rows)
    given: Any = {"num_ranks": 2, "num_microbatches": 4, "options": options}
    with sl.Pipeline(model, F.cross_entropy, **given) as pipe:
        pipe.step(*batches()[0])
    assert made.count(ROWS) == count


def test_the_peak_of_memory_is_a_table_less() -> None:
    """Counted by what torch's profiler sees allocated and freed during a step."""

    def peak(*, in_rows: bool) -> int:
        model = nn.Sequential(nn.Embedding(ROWS, WIDTH), Mean(), nn.Linear(WIDTH, 5))
        options = sl.Options(embedding_rows=in_rows)
        given: Any = {
            "num_ranks": 1,
            "num_microbatches": 4,
            "backend": "serial",
            "options": options,
        }
        watched = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        with sl.Pipeline(model, F.cross_entropy, **given) as pipe, watched as profiler:
            pipe.step(*batches()[0])
        events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
        sizes: list[int] = [event.nbytes() for event in sorted(events, key=lambda e: e.start_ns())]
        return max(accumulate(sizes))

    table = ROWS * WIDTH * 4
    assert table < peak(in_rows=True) < 1.1 * table
    assert peak(in_rows=False) > 2 * table


class Storages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Asks every tensor for its storage, as those do that count memory."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Any = None,
    ) -> Any:
        result = func(*args, **kwargs or {})
        if isinstance(result, Tensor):
            result.untyped_storage()
        return result


def test_modes_below_autograd_see_no_sparse_tensors(additions: list[int]) -> None:
    def run(table: nn.Embedding, x: Tensor) -> None:
        with Storages():  # type: ignore[no-untyped-call]
            lookup(table, x)

    assert_equal_to_autograd(run, lambda: nn.Embedding(ROWS, WIDTH))
    assert not additions


def test_the_option_turns_it_off(additions: list[int]) -> None:
    options = sl.Options(embedding_rows=False)
    with sl.Pipeline(
        shared_table(), F.cross_entropy, num_ranks=2, num_microbatches=4, options=options
    ) as pipe:
        for x, y in batches():
            pipe.step(x, y)
    assert not additions


def test_an_asynchronous_stream_has_the_same_bits(additions: list[int]) -> None:
    def weights(*, in_rows: bool) -> list[Tensor]:
        torch.manual_seed(0)
        layers = shared_table()
        with sl.Pipeline(
            layers,
            F.cross_entropy,
            num_ranks=2,
            num_microbatches=2,
            schedule="pipedream_2bw",
            optimizer_fn=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            options=sl.Options(embedding_rows=in_rows),
        ) as pipe:
            list(pipe.run([*batches(), *batches()]))
        return list(layers.modules.parameters())

    for found, wanted in zip(weights(in_rows=True), weights(in_rows=False), strict=True):
        assert_same_bits(found, wanted)
    assert additions
